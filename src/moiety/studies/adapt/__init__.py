"""Self-distilled further pre-training (Lee et al. 2023, arXiv 2210.02871), measured again."""

PAPER = "Lee et al. 2023, self-distillation"  # whose claims are corrected together
