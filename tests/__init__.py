"""Tests; importing them has every shape that public tensor functions state checked at each call."""

from jaxtyping import install_import_hook

CHECKED = ("megalite.tensor_parallel", "model.gpt")
install_import_hook(CHECKED, "beartype.beartype")
