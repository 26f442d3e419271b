"""Next action for each cause, with a command or a line of code."""

from collections.abc import Iterable

_MEASURE = 'watch(..., signals=trainvitals.SignalSettings(every=1, activations=("*",)))'
_MORE_WORKERS = "DataLoader(..., num_workers=8, prefetch_factor=4, persistent_workers=True)"
_PROFILE = "watch(..., signals=trainvitals.SignalSettings(profile_slowdowns=True))"
_HEAL = 'watch(..., mode="heal", checkpoints=True)'
_WRITES = "watch(..., signals=trainvitals.SignalSettings(every=1, outside_writes=True))"
_RATE = (
    "Check what sets the rate: the loop must not call `scheduler.step()` if `watch()` was given "
    "the scheduler."
)
_READ = "Read completions of it: `vitals why {run} {step}` shows those that the loop passed to "
_READ += "`monitor.observe_samples`."
_GO_BACK = "Continue from a checkpoint before step {step}, of your trainer or of Vitals (`vitals "
_GO_BACK += "checkpoints list {run}`); quarantine later ones with `vitals checkpoints quarantine`."
_ADVICE = {
    "nonfinite_loss": f"To name the module that is infinite first, run with `{_MEASURE}`.",
    "nonfinite_gradient": "To name the operation, run the step with "
    "`torch.autograd.set_detect_anomaly(True)`.",
    "nonfinite_params": "Load a checkpoint from before step {step}: "
    f"`vitals checkpoints list {{run}}`. With `{_HEAL}` Vitals rolls back by itself.",
    "nonfinite_state": "Load a checkpoint from before step {step}: "
    "`vitals checkpoints list {run}`.",
    "loss_outlier": "Look at the samples of the step: `vitals why {run} {step}`.",
    "grad_norm_outlier": "Look at the samples of the step: `vitals why {run} {step}`.",
    "loss_divergence": "Lower the learning rate or lengthen the warm-up, from a checkpoint before "
    "step {step}: `vitals checkpoints list {run}`.",
    "state_damaged": f"To name what writes to the weights, run with `{_WRITES}`.",
    "weight_norm": "Check what writes to the weights besides the optimizer, and the weight decay: "
    f"run with `{_WRITES}`. `monitor.expect(\"new weights\")` announces a change that is intended.",
    "lr_jump": f"{_RATE} `monitor.expect(\"new rate\")` announces a jump that is intended.",
    "learning_rate": _RATE,
    "schedule": _RATE,
    "weight_decay": "Check what sets `weight_decay` in the optimizer's parameter groups: the loop, "
    "a callback, or the config of the restart; `vitals show {run} --metric steps.weight_decay`. "
    "`monitor.expect(\"new weight decay\")` announces a change that is intended.",
    "layer_gradient": "Check the layer: `requires_grad`, `detach()` or `torch.no_grad()` before "
    "it, whether its parameters are in the optimizer, and whether its units are all off (ReLU).",
    "zero_gradient": "Check that the loss depends on the model: `detach()`, `torch.no_grad()`, "
    "`requires_grad`.",
    "update_ratio": "If its second moments were set to 0, name what writes to them: run with "
    f"`{_WRITES}`. Otherwise give the layer a parameter group with a lower `lr`, or a longer "
    "warm-up.",
    "loss_scale": "Use bfloat16: `torch.autocast(device, dtype=torch.bfloat16)` needs no scaler.",
    "data_bound": f"Give the loader more workers: `{_MORE_WORKERS}`.",
    "loader_stall": f"Look at what the loader read then; a larger reserve: `{_MORE_WORKERS}`.",
    "data_bound_rank": "Check the disk and the shard of this rank; more workers: "
    f"`{_MORE_WORKERS}`.",
    "straggler_data": f"Give its loader more workers: `{_MORE_WORKERS}`.",
    "straggler_host": "Find what uses its CPU: `top` on its node, `OMP_NUM_THREADS=1`.",
    "straggler_gpu": "Check its clocks: `nvidia-smi -q -d CLOCK,PERFORMANCE` on its node.",
    "straggler_link": "Check its link: `ibstat` and `nvidia-smi nvlink -s` on its node.",
    "straggler": "Check its clocks: `nvidia-smi -q -d CLOCK,PERFORMANCE` on its node.",
    "throughput": f"To get a profile of a slow step, run with `{_PROFILE}`.",
    "memory_creep": "Look for tensors that are kept with their graph: append `loss.item()`, not "
    "`loss`, to lists.",
    "gpu_throttle": "Check temperature and power: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`.",
    "gpu_xid": "Look up the Xid: `dmesg | grep -i xid` on its node.",
    "gpu_ecc": "Reset or replace the GPU: `nvidia-smi -q -d ECC` on its node.",
    "replica_corrupted": "Take the node out of the job and run `dcgmi diag -r 3` on it.",
    "policy_collapse": f"{_GO_BACK} Lower the learning rate, or raise beta. {_READ}",
    "repetition": f"If full length is best for the task, nothing is wrong. {_READ}",
    "kl_runaway": f"{_GO_BACK} Raise beta, or lower the learning rate. {_READ}",
    "dead_reward": f"Check the reward's parser and the prompts' success rate. {_READ}",
    "truncation": "Check the end-of-sequence token of the chat template, and the length limit. "
    f"{_READ}",
    "reward_hacking": f"{_GO_BACK} Fix the flaw of the reward. {_READ}",
    "reward_jump": f"Announce an intended change: `monitor.expect(\"new reward\")`. {_READ}",
    "policy_ratio": "Lower the learning rate, or the number of updates per batch of samples.",
    "clip_saturated": "Lower the learning rate, or the number of updates per batch of samples.",
    "sampler_gap": "Compare the log-probabilities of one prompt in trainer and sampler.",
    "preference": f"{_GO_BACK} Lower the learning rate, raise beta, or add an SFT term.",
    "preference_leak": "Compare some pairs as tokens: template, length, marks.",
    "overconfidence": f"{_GO_BACK} Train for fewer epochs or on more pairs.",
    "memorized": f"{_GO_BACK} Train for fewer epochs or on more rows.",
    "epochs_repeated": f"{_GO_BACK} Train for fewer epochs or on more rows.",
    "known_rows": "Decode some labels: prompts may contain the answers.",
    "forgetting": "Start again from the base model with a tenth of the learning rate.",
    "labels": "Decode the labels of some rows: only completions must have labels.",
    "padding_labels": "Set the labels of padding to -100.",
    "no_end_label": "End each completion with the tokenizer's eos_token, and give it a label.",
    "prompt_labels": "Set the labels of prompts to -100: `completion_only_loss=True`.",
    "adapter": "Make the optimizer after the adapter, from parameters with requires_grad.",
    "base_trained": "Set requires_grad to False for all parameters except the adapters.",
    "checkpoint_overdue": "Check the free space and the log of the checkpoint directory: "
    "`df -h`, `vitals checkpoints list {run}`.",
}  # fmt: skip


def advice(names: Iterable[str], run_id: str, step: int) -> str:
    """Return the verdict's advice on the first cause or kind that has one; otherwise ""."""
    text = next((_ADVICE[name] for name in names if name in _ADVICE), "")
    return text.format(run=run_id, step=max(step, 0)) if text else ""
