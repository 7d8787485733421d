"""Names that other projects give to our settings: errors say ours. Loads no torch.

Of TRL's and transformers' trainers, OpenRLHF, verl and ms-swift; and those that settings of ours had before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

OUR_NAMES: Mapping[str, tuple[str, ...]] = {
    "actor_learning_rate": ("learning_rate",),
    "adapter_name_or_path": ("start", "model"),
    "beta": ("kl",),
    "bf16": ("precision",),
    "cliprange": ("objective",),
    "critic_learning_rate": ("critic",),
    "dataset": ("samples",),
    "dataset_name": ("samples",),
    "deepspeed": ("strategy",),
    "epsilon": ("objective",),
    "epsilon_high": ("objective",),
    "eval_steps": ("evaluations",),
    "fp16": ("precision",),
    "generate_max_len": ("max_answer_tokens",),
    "gradient_accumulation_steps": ("batch_size", "max_tokens"),
    "gradient_checkpointing": ("activation_checkpointing",),
    "init_kl_coef": ("kl",),
    "kl_coef": ("kl",),
    "lora_alpha": ("lora",),
    "lora_dropout": ("lora",),
    "lora_r": ("lora",),
    "lora_rank": ("lora",),
    "lora_target_modules": ("lora",),
    "loss_type": ("objective",),
    "lr": ("learning_rate",),
    "lr_scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "max_completion_length": ("max_answer_tokens",),
    "max_epochs": ("passes",),
    "max_grad_norm": ("clip_norm",),
    "max_new_tokens": ("max_answer_tokens", "max_tokens"),
    "max_norm": ("clip_norm",),
    "max_response_length": ("max_answer_tokens",),
    "max_seq_length": ("max_length",),
    "max_steps": ("steps",),
    "micro_train_batch_size": ("max_tokens",),
    "model_name_or_path": ("start", "model"),
    "n_samples_per_prompt": ("group_size",),
    "num_generations": ("group_size",),
    "num_iterations": ("updates",),
    "num_return_sequences": ("group_size",),
    "num_train_epochs": ("passes",),
    "per_device_train_batch_size": ("batch_size",),
    "ppo_epochs": ("updates",),
    "pretrain": ("start", "model"),
    "prompt_data": ("samples",),
    "ref_model": ("reference",),
    "resume_from_checkpoint": (),
    "reward_funcs": ("rewards",),
    "reward_model_path": ("rewards",),
    "reward_weights": ("rewards",),
    "rollout_batch_size": ("batch_size",),
    "save_steps": ("checkpoint_seconds",),
    "scale_rewards": ("advantage",),
    "sync_ref_model": ("refresh_reference",),
    "total_epochs": ("passes",),
    "train_batch_size": ("batch_size",),
    "train_dataset": ("samples",),
    "train_files": ("samples",),
    "train_type": ("trained",),
    "use_peft": ("trained",),
    "warmup_ratio": ("warmup_steps",),
    "zero_stage": ("strategy",),
}
"""Their name -> our names, the likeliest first; empty: a run needs no such setting."""
EARLIER_NAMES: Mapping[str, tuple[str, ...]] = {
    "answers": ("group_size",),
    "latents": ("samples",),
    "listen": ("eval_audio_samples",),
    "max_tokens": ("max_answer_tokens",),
    "model": ("start", "shape"),
    "shards": ("samples",),
}
"""Names that some stages' settings had in earlier versions -> their names now."""
NOT_NEEDED = {"resume_from_checkpoint": "a run that was ended goes on by the same command"}


def our_name(name: str, known_settings: Collection[str]) -> str | None:
    """Return a sentence that says what a setting of another project, or of an earlier version, is called here.

    Args:
        name: as it was written.
        known_settings: the settings at this place.

    Returns:
        None where the name is of no other project, or the place has no setting of this kind.
    """
    if name in NOT_NEEDED:
        return f"leave it out: {NOT_NEEDED[name]}."
    candidates = (*OUR_NAMES.get(name, ()), *EARLIER_NAMES.get(name, ()))
    ours = [setting for setting in candidates if setting in known_settings]
    return f"it is called {' or '.join(ours)} here." if ours else None
