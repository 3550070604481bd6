"""What an attacker can do to a model, and through which door."""
