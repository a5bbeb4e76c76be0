"""The optimiser: AdamW with warm-up, cosine decay and clipping by the global norm (optax)."""

import optax

from labkit.train.settings import TrainSettings


def learning_rate_schedule(settings: TrainSettings) -> optax.Schedule:
    """update index (from 0) -> learning rate: linear up to the peak over `warmup` updates, then a cosine down to `final_fraction` of it at the last."""
    return optax.warmup_cosine_decay_schedule(
        init_value=settings.learning_rate / (settings.warmup + 1) if settings.warmup else settings.learning_rate,
        peak_value=settings.learning_rate,
        warmup_steps=settings.warmup,
        decay_steps=max(settings.steps, settings.warmup + 1),
        end_value=settings.learning_rate * settings.final_fraction,
    )


def make_optimizer(settings: TrainSettings, decayed: dict[str, bool]) -> optax.GradientTransformation:
    """decayed: parameter name -> whether weight decay acts on it."""
    steps = [] if settings.clip is None else [optax.clip_by_global_norm(settings.clip)]
    steps.append(
        optax.adamw(
            learning_rate_schedule(settings),
            b1=settings.beta_1,
            b2=settings.beta_2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=decayed if settings.weight_decay else None,
        )
    )
    return optax.chain(*steps)
