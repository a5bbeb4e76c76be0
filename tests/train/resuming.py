"""A training run that stops and goes on: `python resuming.py FOLDER` goes on to its end in a process of its own."""

import sys
from pathlib import Path

MODEL = "tiny:llama?num_hidden_layers=2"


def run(folder: Path, stop_at: int | None = None, *, seed: int = 1, layers: int | None = None):
    """Six updates in two parts each into FOLDER, from where its checkpoints end; leaves after update `stop_at`. Returns the TrainRun."""
    import numpy as np

    from labkit.converters import load_model
    from labkit.hf import open_source
    from labkit.train.checkpoints import RunCheckpoints
    from labkit.train.data import PackedData
    from labkit.train.loop import train_loop
    from labkit.train.metrics import MetricsFile
    from labkit.train.settings import TrainSettings

    source = open_source(MODEL if layers is None else f"tiny:llama?num_hidden_layers={layers}")
    model, config, _ = load_model(source)
    settings = TrainSettings(steps=6, batch=4, length=16, accumulate=2, warmup=2, learning_rate=1e-2, checkpoint_every=100)
    data = PackedData.pack([np.random.RandomState(i).randint(0, config.vocab_size, 30 + i) for i in range(5)], length=16, batch=4, seed=seed)
    identity = {"settings": settings.as_dict(), "data": data.as_dict()}
    checkpoints, lines = RunCheckpoints(folder / "steps", keep=1, identity=identity), []
    try:
        return train_loop(
            model,
            source.config.model_type,
            data,
            settings,
            checkpoints=checkpoints,
            on_resume=lambda step: lines.append(MetricsFile(folder / "metrics.jsonl", step)),
            on_step=lambda record: lines[0].add(record),
            stop=lambda step: step == stop_at,
        )
    finally:
        checkpoints.close()


if __name__ == "__main__":
    done = run(Path(sys.argv[1]))
    assert done.finished and [record["step"] for record in done.records] == [4, 5, 6]
