"""Results as the paper prints them."""

# Table "app-distinct": residual AUROC of u_sem over MSP and entropy.
RESIDUAL_AUROC = {
    ("Qwen3-4B", "BabiQA"): (0.589, 0.547, 0.627),
    ("Qwen3-4B", "CoQA"): (0.549, 0.501, 0.595),
    ("Qwen3-4B", "SQuAD"): (0.550, 0.516, 0.584),  # the analysis draw
    ("Qwen3-4B", "TriviaQA"): (0.495, 0.465, 0.524),
    ("Qwen3-8B", "BabiQA"): (0.603, 0.558, 0.641),
    ("Qwen3-8B", "CoQA"): (0.517, 0.472, 0.560),
    ("Qwen3-8B", "SQuAD"): (0.543, 0.504, 0.586),
    ("Qwen3-8B", "TriviaQA"): (0.511, 0.475, 0.547),
}
