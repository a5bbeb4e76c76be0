"""transformers' own tensor-parallel plan of a model: which linear layers it cuts by columns and which by rows."""

from labkit.hf.quiet import quiet_transformers


def tensor_parallel_plan(model_type: str) -> dict[str, str]:
    """{module or parameter path with `*` for numbers: style} of a causal LM, empty where transformers has none. Imports the modeling class.

    Paths are those of the base model (no `model.` in front), from `base_model_tp_plan` of its config class; the head's is its own, from `_tp_plan`.
    """
    with quiet_transformers():
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config_class = CONFIG_MAPPING[model_type]
        model_class = AutoModelForCausalLM._model_mapping[config_class]
    return dict(config_class.base_model_tp_plan or {}) | dict(getattr(model_class, "_tp_plan", None) or {})
