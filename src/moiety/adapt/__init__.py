"""Carry a masked encoder, of images or of text, to a new domain.

Further pre-training, self-distillation and fine-tuning as in "Self-Distillation for Further
Pre-training of Transformers" (arXiv 2210.02871), for ViT-MAE and for every masked language model.
"""
