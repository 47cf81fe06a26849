"""A scorer for `mlflow.genai.evaluate`."""

from typing import Any

from lm_polygraph_asmi.adapters.contract import assess, extra, open_scorer


def asmi(
    model: Any,
    *,
    prompt: str = "prompt",
    name: str = "asmi",
    **settings: Any,
) -> Any:
    """A scorer that gives each answer its fragility, nats; higher = more fragile.

    Rationale is the decision's reason; metadata holds the free baselines, the calibrated error
    probability, the decision and the config's key, as texts.

    Args:
        model: that wrote the answers: name, folder or loaded transformers model.
        prompt: field of `inputs` that holds the prompt, a text or chat messages.
        name: of the feedback.
        **settings: of `ASMIConfig`; `calibration`, a calibration run; a loaded model's `tokenizer`.

    Raises:
        ImportError: the extra `mlflow` is not installed.
        OSError, TypeError, ValueError: as `Scorer`.
    """
    with extra("mlflow"):
        from mlflow.entities import Feedback
        from mlflow.genai.scorers import scorer

    own = open_scorer(model, **settings)

    @scorer(name=name)
    def fragility(inputs: dict[str, Any], outputs: Any) -> Feedback:
        if prompt not in inputs:
            raise ValueError(f"expected inputs with the field {prompt!r}, got {sorted(inputs)}")
        if not isinstance(outputs, str):
            raise TypeError(f"expected the answer as a text, got {type(outputs).__name__}")
        found = assess(own, inputs[prompt], outputs)
        metadata = {key: str(value) for key, value in found.to_dict().items() if value is not None}
        metadata["decision"] = found.decision or "none"
        return Feedback(name=name, value=found.score, rationale=found.reason, metadata=metadata)

    return fragility
