"""Anytime learning at macroscale (Caccia et al. 2022, arXiv 2106.09563), measured again."""

PAPER = "Caccia et al. 2022, anytime learning"  # whose claims are corrected together
