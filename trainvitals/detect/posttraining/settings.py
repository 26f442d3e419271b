"""Settings of the detectors over the scalars of post-training runs."""

from typing import Annotated

from msgspec import Meta

from trainvitals.config import AboveOne, AboveZero, AtLeastOne, Settings

Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class PostTrainingConfig(Settings, frozen=True, kw_only=True):
    """When the scalars of a post-training run show a problem.

    Values are counted as logged: a trainer that logs every 10th step gives one value per 10 steps.
    """

    section = "posttraining"
    ascending = (("dead_share", "never_share"), ("dead_values", "never_values"))

    window: Annotated[int, Meta(ge=4)] = 10
    """Values in a level: its median is the level."""
    clear_after: AtLeastOne = 20
    """Values without the problem after which it can be reported again."""
    entropy_part: Share = 0.1
    """Part of its highest level at which the entropy is low. Healthy policies come to this too, so
    a low entropy alone is not reported."""
    gain_sigmas: AboveZero = 3.0
    """Smallest gain or loss of the reward that counts, in standard deviations of a logged value.
    The best of 40 levels of pure noise is 0.9 above their mean, the first level up to 1.5 below. A
    certain trend over all values counts too, however small the gain."""
    at_best: Share = 0.25
    """Part of its gain that the reward may lose and still count as at its best."""
    dead_share: Share = 0.9
    """Mean share of groups without a gradient that is reported."""
    jump_from: Share = 0.5
    """Largest mean share of groups with equal rewards before a reward that becomes constant."""
    never_share: Share = 0.995
    """Share of dead groups of a run that never had a gradient, since its start."""
    never_values: Annotated[int, Meta(ge=4)] = 100
    """Values of such a run before it is reported: a rare first success may still come. Before as
    many no reward counts as one that did not rise."""
    dead_values: Annotated[int, Meta(ge=4)] = 20
    """Values over which this share, and the share of cut completions, is taken."""
    dead_rise: Share = 0.3
    """Smallest rise of this share: a task that is rarely solved at first has many dead groups."""
    cut_share: Share = 0.8
    """Mean share of completions cut at the length limit that is reported."""
    full_share: Share = 0.98
    """The same share for completions that grew, if noise could hide a gain of the reward."""
    cut_rise: Share = 0.3
    """Smallest rise of this share that is a change of the policy."""
    kl_times: AboveOne = 3.0
    """Growth of the divergence since the reward was at its best that is reported."""
    kl_floor: AboveZero = 0.3
    """Divergence per token below which nothing is reported: a slow gain may still be hidden in the
    noise of the reward."""
    kl_floor_of_sequence: AboveZero = 30.0
    """The same for a divergence summed over a completion."""
    clip_share: Share = 0.5
    """Share of clipped tokens that is reported: most of each batch has no effect."""
    ratio_times: AboveOne = 2.0
    """Mean probability ratio, or its inverse, that is reported."""
    sampler_gap: AboveZero = 0.1
    """Mean difference of log-probabilities between trainer and sampler that is reported. bf16 with
    another kernel gives 0.005 to 0.02."""
    held_out_part: Share = 0.5
    """Part of its gain that a held-out reward must lose while the training reward keeps its own."""
    held_out_values: Annotated[int, Meta(ge=2)] = 3
    """Consecutive evaluations that must show it."""
    chosen_times: AboveOne = 2.0
    """Growth of the chosen completions' negative log-probability that is reported. At most 1.5 is
    needed while the accuracy is below 0.6."""
    leak_accuracy: Share = 0.98
    """Mean accuracy of the first steps that only a leak, or a trivial difference, explains."""
    leak_steps: AtLeastOne = 100
    """Steps that count as the first ones."""
    easy_loss: AboveZero = 0.5
    """Evaluation loss of SFT below which the task is easy, and no row counts as memorized."""
    memorized_part: Share = 0.4
    """Largest part of the evaluation loss that the training loss of memorized rows is, while the
    evaluation loss rises or stays."""
    eval_rise: AboveZero = 0.05
    """Rise of the evaluation loss above its best that counts, as a part of it, and in nats."""
    epoch_drop: Share = 0.1
    """Drop of the training loss at the start of an epoch, as a part of it, that counts."""
    known_loss: AboveZero = 0.05
    """Training loss of SFT from the first step on that leaves nothing to learn."""
    forget_times: AboveOne = 2.0
    """Rise of the loss of SFT above its first value that the base model does not survive."""
    forget_rise: AboveZero = 1.0
    """Smallest such rise, in nats."""
    label_share: Share = 0.01
    """Share of the labels that is reported if they are padding."""
    prompt_label_share: Share = 0.5
    """Share of the prompts' tokens with labels that is reported."""
    margin_times: AboveOne = 2.0
    """Growth of the margin of the pairs since the best evaluation that is reported if the
    evaluation became worse."""
    eval_accuracy_loss: Share = 0.05
    """Accuracy of the evaluation that must be lost for it."""
