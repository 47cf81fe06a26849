"""Shipped configs with overrides, as Hydra composes them; the slow part once in a process."""

import os
from copy import deepcopy
from functools import cache

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from lm_polygraph_asmi.host.configs import configs_path
from tests.conftest import AS_USERS


@cache
def _of_groups(name: str, *choices: str) -> DictConfig:
    with initialize_config_dir(str(configs_path()), version_base=None):
        return compose(name, list(choices), return_hydra_config=True)


def composed(name: str, *overrides: str) -> DictConfig:
    """A copy with its node hydra. Files are composed with choices of groups, then values set."""
    if AS_USERS in os.environ:
        return _of_groups.__wrapped__(name, *overrides)
    keys = {text: text.partition("=")[0].lstrip("+~").partition("@")[0] for text in overrides}
    choices = [text for text, key in keys.items() if (configs_path() / key).is_dir()]
    config = deepcopy(_of_groups(name, *choices))
    values = OverridesParser.create().parse_overrides([t for t in keys if t not in choices])
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


def run_of(name: str, *overrides: str) -> DictConfig:
    """What `compose_run` of the package returns."""
    config = composed(name, *overrides)
    config.hydra.runtime.output_dir = "${hydra.run.dir}"
    config.hydra.job.num = 0
    HydraConfig.instance().set_config(config)
    return config
