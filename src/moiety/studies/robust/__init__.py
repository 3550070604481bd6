"""Robustness of mixtures of experts (Puigcerver et al. 2022, arXiv 2210.10253), measured again."""

PAPER = "Puigcerver et al. 2022, robustness"  # whose claims are corrected together
