"""The conformance suite: eight checks that every slice passes, refined or translated, and the comparisons with the reference that stand beside them."""

from labkit.parity.conformance.report import Check, Conformance
from labkit.parity.conformance.subject import Subject, exactly
from labkit.parity.conformance.suite import BESIDE, CHECKS, NAMES, conformance

__all__ = ["BESIDE", "CHECKS", "NAMES", "Check", "Conformance", "Subject", "conformance", "exactly"]
