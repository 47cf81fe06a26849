"""How many masks fit into memory at once."""

import torch
from transformers import PreTrainedModel

CPU_BUDGET = 2**30


def default_budget(device: torch.device) -> int:
    """Bytes for masked passes: half of the free device memory, or 1 GiB on a CPU.

    Larger batches do not make a CPU faster, so its figure is small on purpose.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 2
    return CPU_BUDGET


def suffix_bytes_per_mask(model: PreTrainedModel, num_tokens: int) -> int:
    """Peak bytes of one layer's activations for one mask over `num_tokens` positions.

    A count of the tensors alive at once in a decoder layer: residual stream and norm output, the
    attention projections, the gated MLP, and the score matrices of eager attention.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = config.num_attention_heads * head_dim
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    per_token = 4 * hidden + max(4 * heads, 3 * intermediate)
    scores = 3 * config.num_attention_heads * num_tokens
    return num_tokens * (per_token + scores) * model.dtype.itemsize
