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
    """A scorer for the fragility of each answer, nats; higher = more fragile.

    With a calibration, the value is that of its deciding signal.
    The rationale is the decision's reason. Metadata, as texts: free baselines, calibrated error
    probability, decision and the config's key.

    Args:
        model: that generated the answers: hub ID, local path or loaded transformers model.
        prompt: field of `inputs` with the prompt, a text or chat messages.
        name: of the feedback.
        **settings: of `ASMIConfig`; `calibration`; a loaded model's `tokenizer`.

    Raises:
        ImportError: the extra `mlflow` is not installed.
        OSError, TypeError, ValueError: as `Scorer`.
    """
    with extra("mlflow"):
        from mlflow.entities import Feedback
        from mlflow.genai.scorers import scorer

    model_scorer = open_scorer(model, **settings)

    @scorer(name=name)
    def fragility(inputs: dict[str, Any], outputs: Any) -> Feedback:
        if prompt not in inputs:
            raise ValueError(f"expected inputs with the field {prompt!r}, got {sorted(inputs)}")
        if not isinstance(outputs, str):
            raise TypeError(f"expected the answer as a text, got {type(outputs).__name__}")
        result = assess(model_scorer, inputs[prompt], outputs)
        metadata = {key: str(value) for key, value in result.to_dict().items() if value is not None}
        metadata["decision"] = result.decision or "none"
        return Feedback(name=name, value=result.value, rationale=result.reason, metadata=metadata)

    return fragility
