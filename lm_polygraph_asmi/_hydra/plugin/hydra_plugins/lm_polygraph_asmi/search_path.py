"""The search path plugin. It must be light, since every program that uses Hydra imports it."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lm_polygraph_asmi._hydra.resolvers import register_resolvers
from lm_polygraph_asmi.host.configs import configs_path, store_settings

register_resolvers()
store_settings()


class ASMISearchPath(SearchPathPlugin):
    """Adds the plugin's configs to Hydra's search path, from any working directory."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lm-polygraph-asmi", path=f"file://{configs_path()}")
