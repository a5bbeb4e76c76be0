"""How the reference's threads wait."""

PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For processes that run the reference beside others: idle OpenMP threads sleep instead of spinning. With more runnable threads than cores, spinning made a
decode of 64 tokens take minutes. Must be in the environment before torch is loaded; a value that the user has set goes first."""
