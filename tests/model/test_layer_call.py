"""What a decoder layer was called with, and what it is called with again."""

import torch

from lm_polygraph_asmi.model.layer_call import KeyValueTap, LayerCall


class Layer(torch.nn.Module):
    """Takes its arguments in every way a transformers layer does."""

    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        return hidden_states, (cache, attention_mask, kwargs)


def test_arguments_are_bound_to_names_however_they_came():
    layer, hidden = Layer(), torch.ones(1, 5, 3)
    by_position = LayerCall.split(layer, (hidden, None, "mask"), {"position_ids": 7})
    by_name = LayerCall.split(
        layer,
        (),
        {"hidden_states": hidden, "cache": None, "attention_mask": "mask", "position_ids": 7},
    )
    for found, call in (by_position, by_name):
        assert found is hidden
        assert call.arguments == {"cache": None, "attention_mask": "mask", "position_ids": 7}
        assert call.num_positions == 5


def test_only_what_has_an_entry_per_position_is_picked():
    tap = KeyValueTap(lambda key, value, _: (key, value))
    angles = torch.arange(30.0).reshape(1, 5, 6)
    arguments = {
        "cache": tap,
        "attention_mask": torch.ones(1, 1, 5, 5),
        "position_ids": torch.arange(5)[None],
        "cache_position": torch.arange(5),
        "position_embeddings": (angles, None),
        "scale": torch.tensor(2.0),
        "flags": [True],
        "window": None,
        "other": torch.ones(1, 4),
    }
    picked = LayerCall(arguments, 5)._at(torch.tensor([3, 4, 3]))
    assert picked["position_ids"].tolist() == [[3, 4, 3]]
    assert picked["cache_position"].tolist() == [3, 4, 3]
    assert torch.equal(picked["position_embeddings"][0], angles[:, [3, 4, 3]])
    for name in ("scale", "flags", "window", "other"):
        assert picked[name] is arguments[name]
    assert "cache" not in picked
    assert "attention_mask" not in picked
