"""DSelect-k (Hazimeh et al. 2021, arXiv 2106.03760): its results measured again."""
