"""Composes the config of a run outside of a run."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from lm_polygraph_asmi.host.configs import configs_path


def compose_run(name: str, folder: str | None = None, overrides: Sequence[str] = ()) -> DictConfig:
    """A run's config with the node `hydra`, composed as polygraph_eval does.

    A config in `folder` hides a shipped one of the same name; polygraph_eval would use the latter.
    """
    config_folder = Path(folder).resolve() if folder else configs_path()
    try:
        with initialize_config_dir(
            str(config_folder), version_base=None, job_name="polygraph_eval"
        ):
            config = compose(name, list(overrides), return_hydra_config=True)
    except HydraException as error:
        raise ValueError(str(error)) from error
    config.hydra.runtime.output_dir = "${hydra.run.dir}"
    config.hydra.job.num = 0  # of the first job, which folders may be named after
    HydraConfig.instance().set_config(config)  # what ${hydra:...} reads
    return config
