"""Compose the config of a run without starting the run."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.validation import did_you_mean


def compose_run(name: str, folder: str | None = None, overrides: Sequence[str] = ()) -> DictConfig:
    """A run's config with the node `hydra`, composed as polygraph_eval composes it.

    If `folder` and the shipped configs have one of the same name, that in `folder` is used, while
    polygraph_eval would use the shipped one. Raises ValueError: the config cannot be composed; the
    message suggests names near to a wrong one.
    """
    try:
        config = _composed(name, folder, overrides)
    except MissingConfigException as error:
        raise ValueError(_missing_config(error, folder)) from error
    except YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"a config cannot be read as YAML: {problem}") from error
    except HydraException as error:
        problem = " ".join(str(error).split())
        first, _, key = problem.partition("Could not override '")
        meant = _suggestion(key.split("'")[0], name, folder, overrides) if key and not first else ""
        raise ValueError(problem.replace("'. ", f"'{meant}. ", 1)) from error
    except TypeError as error:  # values were given where a group's name was expected
        given = " ".join(text for text in overrides if "{" in text)
        raise ValueError(
            "expected names of files (`polygraph_asmi configs` lists them), got "
            f"{given or error}: to set such values, write a config of your own"
        ) from error
    config.hydra.runtime.output_dir = "${hydra.run.dir}"
    config.hydra.job.num = 0  # the first job's number, after which folders may be named
    HydraConfig.instance().set_config(config)  # the resolver ${hydra:...} reads it
    return config


def _composed(name: str, folder: str | None, overrides: Sequence[str]) -> DictConfig:
    path = str(Path(folder).resolve() if folder else configs_path())
    with initialize_config_dir(path, version_base=None, job_name="polygraph_eval"):
        return compose(name, list(overrides), return_hydra_config=True)


def _missing_config(error: MissingConfigException, folder: str | None) -> str:
    """A message on a missing config file: what was expected in its place."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    known = list(error.options or ())
    if not group:
        homes = [configs_path(), *([Path(folder)] if folder else [])]
        known = sorted(file.stem for home in homes for file in home.glob("*.yaml"))
    wrong = f"{group}={name}" if group else f"--config-name {name}"
    there = f"there are {', '.join(known)}" if known else "there is no such group"
    return f"{wrong} is no config{did_you_mean(name, known)}: {there}"


def _suggestion(key: str, name: str, folder: str | None, overrides: Sequence[str]) -> str:
    """A question that suggests the setting that an unknown one may mean; or empty."""
    others = [text for text in overrides if text.lstrip("+~").partition("=")[0] != key]
    try:
        config = _composed(name, folder, others)
    except HydraException:
        return ""
    parent, dot, _ = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    siblings = [str(child) for child in node] if isinstance(node, DictConfig) else []
    groups = [] if parent else [path.name for path in configs_path().iterdir() if path.is_dir()]
    return did_you_mean(key, [f"{parent}{dot}{child}" for child in siblings + groups])
