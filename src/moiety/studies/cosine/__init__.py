"""The perturbed cosine router (Nguyen et al. 2025, arXiv 2405.14131): questions of our own."""

PAPER = "Nguyen et al. 2025, perturbed cosine router"  # whose claims are corrected together
