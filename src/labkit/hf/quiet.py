"""transformers without its progress bars and advice, for steps whose outcome the lab reports itself."""

import contextlib


@contextlib.contextmanager
def quiet_transformers():
    """No progress bars, no messages below an error while the block runs; what was set before returns afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
