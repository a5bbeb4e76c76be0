"""Models from the Hugging Face Hub: config, tokenizer and safetensors of one snapshot, from the local cache when offline."""

import os
import re
from pathlib import Path

from labkit.errors import InputError
from labkit.hf.scratch import SHARED_MEMORY, user_name

PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
CODE_PATTERNS = ["*.py"]
PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")


def check_hub_id(model: str) -> str:
    """The id, when it has the form `name` or `org/name` that the hub allows. Raises InputError otherwise."""
    parts = model.split("/")
    bad = ".." in model or "--" in model or model.endswith(".git") or not 1 <= len(parts) <= 2 or not all(PART.fullmatch(part) for part in parts)
    if bad:
        raise InputError(
            f"{model!r} is neither a path that exists nor a hub id", next="A hub id is org/name: letters, digits, '-', '_' and '.', one slash, no '..'"
        )
    return model


def on_tpu_vm() -> bool:
    """True on a host with TPU chips: their device files are there."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def cache_folder() -> Path:
    """The hub cache: $HF_HUB_CACHE, $HF_HOME/hub, /dev/shm/$USER/hub on a TPU VM that has /dev/shm/$USER, or ~/.cache/huggingface/hub."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    if not os.environ.get("HF_HOME") and on_tpu_vm() and (SHARED_MEMORY / user_name()).is_dir():
        os.environ["HF_HOME"] = str(SHARED_MEMORY / user_name())
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"


def snapshot(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """The folder of a snapshot of `model`, downloaded when it is not in the cache. Raises InputError when the id, the revision or the network fails."""
    check_hub_id(model)
    cache = cache_folder()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    wanted = PATTERNS + (CODE_PATTERNS if trust_remote_code else [])
    arguments = {"revision": revision, "cache_dir": cache, "allow_patterns": wanted, "ignore_patterns": ["*/*"]}
    where = f"hub id {model}" + (f", revision {revision}" if revision else "")
    try:
        return Path(snapshot_download(model, **arguments))
    except GatedRepoError:
        raise InputError("This model is gated: its owner must grant you access", where, "Ask for access on its page and log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise InputError("The hub has no such model, or it is private", where, "Check the spelling; log in with `hf auth login` for a private model") from None
    except RevisionNotFoundError:
        raise InputError("The model has no such revision", where, "Give a branch, tag or commit of this model") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        # snapshot_download falls back to its cache by itself when the network is away; reaching this line means that the cache has no such snapshot either.
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"The model is not in the local cache and cannot be downloaded: {reason}",
            f"{where}, cache {cache}",
            f"Connect to the network; or download it elsewhere with `hf download {model}` and copy the cache folder here; "
            "or give a local directory; or try the built-in smollm2-135m",
        ) from None
