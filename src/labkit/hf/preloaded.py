"""The heavy packages of the reference, imported at once: for a process from which others are forked."""

import torch
import transformers
import transformers.modeling_utils

__all__ = ["torch", "transformers"]
