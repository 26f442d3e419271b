"""Problems of a policy that is trained on completions it samples itself.

Entropy falls, the divergence grows and groups get equal rewards in every successful run too. So
each of these is reported only together with a reward that did not rise, or that was lost again.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from trainvitals.detect.fleet.base import ConditionEpisode, MergedStep, upper_median
from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.base import (
    ABRUPT,
    Milestones,
    PostTrainingWatcher,
    RewardCourse,
    ShareCourse,
    ShortLevel,
    ValueCourse,
    deviation,
    quantity,
)
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.records import Finding

_MAX_EVALUATIONS = 64
_LEVEL = 3
"""Evaluations whose median is the held-out level."""
_DRIFT_EVALUATIONS = 16
"""Evaluations over which a drift without direction adds up."""
_CONSTANT = 8
"""Values of a reward that is the same for all completions, from which it is not chance."""
_FEWEST = 5
"""Values before a constant reward that show that it varied."""
_JUMP = 5
"""Rewards that show a jump."""
_CALM = 20
"""Rewards right before a jump, which are all lower."""
_JUMP_VALUES = 200
_JUMP_SIGMAS = 8.0
_JUMP_TIMES = 3.0
"""Smallest jump, compared with the largest change before it."""
_JUMP_PART = 0.25
"""Smallest jump, as a part of the range of the rewards before it."""
_IN_ONE_STEP = 0.5
"""Smallest part of the rise that is between two values."""
_RISEN = 2.0
"""Smallest rise of the training reward meanwhile, as a median of three, in standard deviations."""
_FALLING_PART = 0.05
"""Smallest loss of a held-out reward that falls while the training reward rises, as a part of its
gain."""


class PolicyCollapseWatcher(PostTrainingWatcher):
    """Reports a policy that became nearly deterministic without success.

    The entropy is below a tenth of its highest level, and the reward was lost or did not rise in
    100 values or more, or completions began to run into the length limit. If the entropy became so
    low within 30 values, 8 more without a gain of reward are enough: a success as fast as this is
    larger than the noise. Without a reward or a share of cut completions it abstains. A reward that
    is at least 0.9 of 1, or whose highest values are cut off or recur, may be solved from the
    start: it is not called flat. Completions that run into the limit while the reward is not lost
    have the cause ``repetition``, which never halts: the reward may be best at full length.
    """

    name = "policy_collapse"
    STATE = ("_entropy", "_reward", "_cut", "_num_before", "_repeats")
    MAY_LACK = True  # states of older versions lack ``_repeats``

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._entropy = ShortLevel()
        self._reward = RewardCourse(self._config)
        self._cut = ShareCourse(self._config.window)
        self._num_before: int | None = None
        """Rewards from before the entropy was low; -1 if the start of the run is unknown."""
        self._repeats = ConditionEpisode(self._config.clear_after)
        """Whether completions run into the limit, although the reward is not lost."""

    def holds(self, cause: str) -> bool:
        """Return whether the policy is still deterministic, without success or at full length."""
        return self._repeats.on if cause == "repetition" else self.goes_on

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the levels of entropy, reward and cut completions that a restart resets."""
        return (self._entropy, self._reward, self._cut)

    def _restarted(self, merged: MergedStep) -> None:
        """Compare no rewards with those of another attempt or process of the policy."""
        super()._restarted(merged)
        self._num_before = -1

    def rebaseline(self) -> None:
        """Compare no rewards with those from before the announced change."""
        super().rebaseline()
        self._num_before = -1

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge entropy and reward of a logged step: a policy that became deterministic."""
        reward, cut = quantity(merged, names.REWARD), quantity(merged, names.CUT_SHARE)
        self._reward.add(reward, merged.step)
        self._cut.add(cut, merged.step)
        entropy = quantity(merged, names.ENTROPY)
        level = None if entropy is None else self._entropy.add(entropy, merged.step)
        highest = self._entropy.highest
        if level is None or highest is None or highest <= 0.0:
            return ()
        limit = self._config.entropy_part * highest
        num_lost = self._reward.num_lost
        if num_lost == ABRUPT and not self._entropy.has_fallen:
            return ()  # two batches may only have been harder
        level = self._entropy.level_of_latest(num_lost) if num_lost else level
        self._note_beyond(level <= limit)
        if level > limit:
            self._repeats.begins(False)
            return self._end_condition()
        if self._num_before is None:
            self._num_before = self._reward.num
        config, mean, lowest = self._config, self._cut.mean, self._cut.lowest
        is_cut = mean is not None and mean >= config.cut_share
        if mean is not None and not is_cut:
            self._repeats.begins(False)
        fell = f"its entropy fell from {highest:.3g} to {level:.3g}, and "
        has_failed = self._has_failed()
        if has_failed:
            reason = (
                f"the policy collapsed: {fell}{self._reward.describe()}. Likely causes: a learning "
                "rate that is too high, no penalty for divergence, a reward without signal, or one "
                "that a fixed text satisfies. Go back to a checkpoint before the fall; lower the "
                "learning rate, or raise beta"
            )
            return self._begin_condition(merged, reason, value=level, limit=limit)
        if mean is not None and is_cut and mean - lowest >= config.cut_rise:
            if has_failed is not None:
                self._episode.begins(False)
            if self._episode.on or not self._repeats.begins(True):
                return ()
            course = f"; {self._reward.describe()}" if self._reward.level is not None else ""
            reason = (
                f"the policy is nearly deterministic: {fell}{mean:.0%} of the completions are cut "
                f"at the length limit (lowest share before: {lowest:.0%}){course}. Likely cause: a "
                "reward that a fixed text satisfies, or one that prefers length. Read some "
                "completions: if full length is best for the task, nothing is wrong"
            )
            return self._report(
                merged.step, reason, value=level, limit=limit, cause="repetition",
                onset_step=self._onset(merged.step),
            )  # fmt: skip
        return () if has_failed is None else self._end_condition()  # unknown is not healthy

    def _has_failed(self) -> bool | None:
        """Return whether the reward shows that the policy failed; None if that is unknown."""
        outcome = self._reward.outcome
        if outcome != "unknown":
            return outcome in ("fell", "flat")
        return True if self._reward.is_without_gain(self._num_before or 0) else None


class DeadRewardWatcher(PostTrainingWatcher):
    """Reports groups without a gradient: all completions of a group have the same reward.

    At least 90% of the groups are so, over 20 values, and the reward was lost; over 2 or 3 values
    if it was lost within as many. A solved task has equal rewards too, and is not reported. A
    reward that suddenly is the same number in all groups, below its best level, is reported after 8
    values. For this, each of up to 20 values before must have had a gradient: with few groups per
    step, steps without one are chance. A run that never had a gradient is reported after 100
    values.
    """

    name = "dead_reward"
    STATE = (
        "_share", "_reward", "_constant", "_num_constant", "_is_constant", "_constant_since",
    )  # fmt: skip
    MAY_LACK = True  # states of older versions lack ``_constant``

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._constant: float | None = None
        """The latest reward, if all completions had it."""
        self._constant_since = 0
        """First step with this reward."""
        self._num_constant = 0
        """Steps in a row with this reward."""
        self._is_constant = False
        """Whether the reward became constant within one step, below its best."""
        self._share = ShareCourse(self._config.dead_values)
        self._reward = RewardCourse(self._config)

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the shares and rewards that a restart of the post-training resets."""
        return (self._share, self._reward)

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge a logged step's share of groups whose completions have equal rewards."""
        reward, share = quantity(merged, names.REWARD), quantity(merged, names.DEAD_SHARE)
        self._reward.add(reward, merged.step)
        if share is None:
            return ()
        before = self._share.recent
        self._share.add(share, merged.step)
        self._note_constant(merged.step, reward, share, before)
        config, num_lost = self._config, self._reward.num_lost
        mean = self._share.mean_of_latest(num_lost) if num_lost else self._share.mean
        if self._is_constant:
            mean = share
        if mean is None or self._reward.level is None:
            return ()
        self._note_beyond(mean >= config.dead_share)
        if self._is_constant:
            self._beyond_since = self._constant_since
        if mean < config.dead_share:
            return self._end_condition()
        outcome, lowest = self._reward.outcome, self._share.lowest
        never = lowest >= config.never_share
        has_risen = mean - lowest >= config.dead_rise
        # Between both, a task that is rarely solved has a few groups with a gradient: it can learn.
        if self._is_constant:
            is_dead = True
        elif never:
            is_dead = self._share.num >= config.never_values and outcome != "at_best"
        elif outcome == "unknown":
            return ()
        else:  # a reward that never rose may be solved from the start
            is_dead = has_risen and outcome == "fell"
        if not is_dead:
            return self._end_condition()
        causes = (
            "prompts that are too hard or too easy, a reward that is constant (check its parser), "
            "a temperature that is too low, or too few completions per prompt"
            if never
            else "a reward that is the same for all completions: check its parser and its service"
            if self._is_constant
            else "a policy that repeats one completion, a reward function that broke (check its "
            "parser), or prompts that became too hard or too easy"
        )
        reason = (
            f"{mean:.0%} of the groups have equal rewards, so they give no gradient, and "
            f"{self._reward.describe()}. Likely causes: {causes}. Look at the completions and "
            "their rewards; filter the prompts by their success rate"
        )
        return self._begin_condition(
            merged, reason, value=mean, limit=config.never_share if never else config.dead_share
        )

    def _restarted(self, merged: MergedStep) -> None:
        """Wait for a constant reward again if its first step is discarded."""
        super()._restarted(merged)
        if merged.step <= self._constant_since:
            self._forget_constant()

    def rebaseline(self) -> None:
        """Wait for a reward that becomes constant after the announced change."""
        super().rebaseline()
        self._forget_constant()

    def _forget_constant(self) -> None:
        """Discard the constant reward of the steps before."""
        self._constant, self._num_constant, self._is_constant = None, 0, False

    def _note_constant(
        self, step: int, reward: float | None, share: float, before: Sequence[float]
    ) -> None:
        """Note whether the reward became the same for all completions within one step.

        While a task is solved, or a policy becomes deterministic, the share of groups with equal
        rewards climbs.

        Args:
            step: the step.
            reward: its mean reward.
            share: its share of groups with equal rewards.
            before: the shares of the steps before.
        """
        is_same = share >= 1.0 and reward is not None
        if is_same and reward == self._constant:
            self._num_constant = min(self._num_constant + 1, 1 << 30)
        else:
            self._forget_constant()
            # With few groups per step all of them may have equal rewards by chance, repeatedly.
            has_had_gradient = len(before) >= _FEWEST and max(before) < 1.0
            if is_same and has_had_gradient and sum(before) <= self._config.jump_from * len(before):
                self._constant, self._num_constant, self._constant_since = reward, 1, step
        best = self._reward.best
        if self._num_constant == _CONSTANT and best is not None and self._constant is not None:
            self._is_constant = self._constant < best - self._reward.noise


class KlRunawayWatcher(PostTrainingWatcher):
    """Reports a policy that moves away from its reference without a gain of reward.

    The reward was lost, and the divergence is three times as high as when it was at its best. Or
    the reward did not rise in 100 values or more, and the divergence is three times as high as in
    the first ones. Below 0.3 per token (30 per completion) nothing is reported.
    """

    name = "kl_runaway"
    STATE = ("_recent", "_first", "_at_best", "_reward", "_milestones")

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._recent: deque[float] = deque(maxlen=self._config.window)
        self._reward = RewardCourse(self._config)
        self._first: float | None = None
        """The first level of the divergence."""
        self._at_best: float | None = None
        """Divergence when the reward was at its best; None: not yet known."""
        self._milestones = Milestones()

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the course of the reward, which a restart of the post-training resets."""
        return (self._reward,)

    def _restarted(self, merged: MergedStep) -> None:
        """Drop the policy's divergence from steps that are trained again."""
        if merged.step <= self._step:
            self._first, self._at_best = self._milestones.go_back(merged.step) or (None, None)
        super()._restarted(merged)
        self._recent.clear()

    def rebaseline(self) -> None:
        """Compare with the policy's divergence at the announced change."""
        super().rebaseline()
        self._recent.clear()
        self._milestones.clear()
        self._first, self._at_best = None, None

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the policy's divergence (KL) and the reward of a logged step."""
        config, floor = self._config, self._config.kl_floor
        reward, kl = quantity(merged, names.REWARD), quantity(merged, names.KL)
        if kl is None:
            floor = config.kl_floor_of_sequence
            kl = quantity(merged, names.KL_OF_SEQUENCE)
        is_best = self._reward.add(reward, merged.step)
        if kl is None:
            return ()
        self._recent.append(kl)
        if len(self._recent) < config.window:
            return ()
        level = upper_median(self._recent)
        if is_best or self._at_best is None:
            self._at_best = level
        first = self._first = level if self._first is None else self._first
        self._milestones.add(merged.step, first, self._at_best)
        self._note_beyond(level >= floor)
        if level < floor:
            return self._end_condition()
        outcome = self._reward.outcome
        if outcome == "unknown" or self._reward.num_lost == ABRUPT:
            return ()
        # The best of a flat reward is noise, and may be any step, unless the reward is far below.
        is_flat = outcome == "flat" and not self._reward.is_far_below_best
        before = first if is_flat else self._at_best
        limit = max(floor, config.kl_times * max(before, 0.0))
        if level < limit or outcome == "at_best":
            return self._end_condition()
        reason = (
            f"the policy moves away from its reference without a gain: the KL divergence is "
            f"{level:.3g}, and was {before:.3g} "
            f"{'at first' if is_flat else 'when the reward was at its best'}; "
            f"{self._reward.describe()}. Likely causes: a beta that is too low, a learning "
            "rate that is too high, or stale samples. Raise beta or lower the learning rate; "
            "use the checkpoint with the best reward"
        )
        return self._begin_condition(merged, reason, value=level, limit=limit)


class TruncationWatcher(PostTrainingWatcher):
    """Reports that nearly all completions are cut at the length limit, without success.

    At least 80% are cut, over 20 values, and the reward was lost, or did not rise in 100 values or
    more; over 2 or 3 values if it was lost within as many. If completions grew until at least 98%
    are cut, 30 values without a gain of reward are enough. A run that learns while all completions
    have full length is not reported.
    """

    name = "truncation"
    STATE = ("_cut", "_reward")

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._cut = ShareCourse(self._config.dead_values)
        self._reward = RewardCourse(self._config)

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the cut shares and rewards that a restart of the post-training resets."""
        return (self._cut, self._reward)

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge a logged step's share of completions that are cut at the length limit."""
        reward, cut = quantity(merged, names.REWARD), quantity(merged, names.CUT_SHARE)
        self._reward.add(reward, merged.step)
        if cut is None:
            return ()
        self._cut.add(cut, merged.step)
        num_lost, config = self._reward.num_lost, self._config
        mean = self._cut.mean_of_latest(num_lost) if num_lost else self._cut.mean
        if mean is None:
            return ()
        self._note_beyond(mean >= config.cut_share)
        if mean < config.cut_share:
            return self._end_condition()
        outcome, lowest = self._reward.outcome, self._cut.lowest
        has_grown = mean - lowest >= config.cut_rise
        is_full = has_grown and mean >= config.full_share and self._reward.has_no_gain
        if outcome == "unknown" and not is_full:
            return ()  # a gain may be hidden in the noise
        if outcome == "at_best":
            return self._end_condition()
        causes = (
            f"completions grew (the lowest share was {lowest:.0%}): a reward that prefers length, "
            "or a policy that repeats itself"
            if has_grown
            else "the chat template has no end-of-sequence token, or max_completion_length is too "
            "short for the task"
        )
        reason = (
            f"{mean:.0%} of the completions are cut at the length limit, and "
            f"{self._reward.describe()}. Likely cause: {causes}. Read some completions; mask "
            "or penalize cut ones"
        )
        return self._begin_condition(merged, reason, value=mean, limit=config.cut_share)


class RewardHackingWatcher(PostTrainingWatcher):
    """Reports a training reward that stays at its best while a held-out reward is lost.

    The held-out reward lost half of its gain in three consecutive evaluations. Or it fell in two
    consecutive ones, by 5% of its gain and by more than noise and drift explain, while the training
    reward rose by more than its noise. Without evaluations it abstains.
    """

    name = "reward_hacking"
    STATE = ("_reward", "_held_out", "_first", "_best", "_num_below", "_num_since",
             "_reward_at_best", "_milestones")  # fmt: skip

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._reward = RewardCourse(self._config)
        self._held_out: deque[float] = deque(maxlen=_MAX_EVALUATIONS)
        self._first: float | None = None
        """The first evaluation, and the best one."""
        self._best: float | None = None
        self._num_below = 0
        self._num_since = 0
        """Evaluations since the best one."""
        self._reward_at_best: float | None = None
        """Level of the training reward at that time."""
        self._milestones = Milestones()

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the course of the training reward, which a restart resets."""
        return (self._reward,)

    def _restarted(self, merged: MergedStep) -> None:
        """Drop the held-out rewards of steps that are trained again."""
        if merged.step <= self._step:
            self._first, self._best = self._milestones.go_back(merged.step) or (None, None)
            self._held_out.clear()
            self._reward_at_best = None
        super()._restarted(merged)
        self._num_below = 0

    def rebaseline(self) -> None:
        """Discard the held-out rewards from before the announced change."""
        super().rebaseline()
        self._held_out.clear()
        self._milestones.clear()
        self._first, self._best, self._num_below = None, None, 0
        self._reward_at_best = None

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge the training reward and the held-out reward of a logged step."""
        reward, held_out = quantity(merged, names.REWARD), quantity(merged, names.HELD_OUT_REWARD)
        self._reward.add(reward, merged.step)
        if held_out is None:
            return ()
        self._held_out.append(held_out)
        # The highest of many single evaluations is mostly noise.
        level = upper_median(list(self._held_out)[-_LEVEL:])
        self._num_since = min(self._num_since + 1, 1 << 30)
        if len(self._held_out) >= _LEVEL and (self._best is None or level > self._best):
            self._best, self._num_since, self._reward_at_best = level, 1, self._reward.level
        first = self._first = held_out if self._first is None else self._first
        best = first if self._best is None else self._best
        self._milestones.add(merged.step, first, best)
        config = self._config
        gain = best - first
        limit = best - config.held_out_part * gain
        is_below = gain > self._reach() and held_out <= limit
        self._num_below = min(self._num_below + 1, 1 << 30) if is_below else 0
        is_falling = gain > self._reach() and self._is_falling(best, gain)
        self._note_beyond(is_below or is_falling)
        if self._num_below < config.held_out_values and not is_falling:
            return self._end_condition()
        outcome = self._reward.outcome
        if outcome == "unknown":
            return ()
        if outcome != "at_best":
            return self._end_condition()
        reason = (
            f"the training reward is {self._reward.level:.3g}, at its best, but the held-out "
            f"reward fell from {best:.3g} to {held_out:.3g}. Likely causes: a flaw of the "
            "reward that the policy exploits, or memorized prompts. Read the completions with "
            "the highest rewards; use the checkpoint with the best held-out reward"
        )
        return self._begin_condition(merged, reason, value=held_out, limit=limit)

    def _is_falling(self, best: float, gain: float) -> bool:
        """Return whether the held-out reward falls, by more than noise, as the other rises."""
        before, reward = self._reward_at_best, self._reward
        if before is None or reward.level is None:
            return False
        if reward.level_of_latest(_LEVEL) <= before + _RISEN * reward.noise:
            return False
        *_, third, second, last = self._held_out
        loss = max(_FALLING_PART * gain, self._reach(self._num_since))
        return last < second < third and last <= best - loss

    def _reach(self, num: int = _MAX_EVALUATIONS) -> float:
        """Return the gain of held-out reward that noise or a drift without direction may have.

        Second differences contain no steady rise or fall.

        Args:
            num: evaluations over which a drift adds up.
        """
        values = list(self._held_out)
        bends = [
            abs(a - 2.0 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)
        ]
        if len(bends) < _LEVEL:
            return math.inf
        num = min(len(values), num, _DRIFT_EVALUATIONS)
        return 2.0 * upper_median(bends) * math.sqrt(num)


class RewardJumpWatcher(PostTrainingWatcher):
    """Reports a reward that rises within one step, as no update of a policy makes it rise.

    Five values are above the 20 before them, by eight standard deviations, three times the largest
    change before and a quarter of the earlier range, and half of that rise is in one step. While
    the reward mostly does not change, or is not logged at each step, the detector abstains.
    """

    name = "reward_jump"
    STATE = ("_values", "_steps")

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._values: deque[float] = deque(maxlen=_JUMP_VALUES)
        self._steps: deque[int] = deque(maxlen=_JUMP + 1)

    def _restarted(self, merged: MergedStep) -> None:
        """Compare no rewards with those of another attempt or process of the policy."""
        super()._restarted(merged)
        self._values.clear()

    def rebaseline(self) -> None:
        """Compare no rewards with those from before the announced change."""
        super().rebaseline()
        self._values.clear()

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge whether the reward jumped five logged values before."""
        reward = quantity(merged, names.REWARD)
        if reward is None:
            return ()
        self._values.append(reward)
        self._steps.append(merged.step)
        values = list(self._values)
        before, after = values[:-_JUMP], values[-_JUMP:]
        if len(before) < _CALM:
            return ()
        first, level = upper_median(before[-_JUMP:]), upper_median(after)
        changes = [abs(b - a) for a, b in pairwise(before)]
        if upper_median(changes) == 0.0:
            return ()  # the first successes at a hard task rise from a constant reward too
        least = max(
            _JUMP_SIGMAS * deviation(before),
            _JUMP_TIMES * max(changes),
            _JUMP_PART * (max(before) - min(before)),
        )
        rise = level - first
        is_sudden = after[0] - before[-1] >= _IN_ONE_STEP * rise
        is_sudden = is_sudden and self._steps[1] == self._steps[0] + 1
        if rise <= 0.0 or rise < least or min(after) <= max(before[-_CALM:]) or not is_sudden:
            return ()
        for _ in before:
            self._values.popleft()
        reason = (
            f"the reward jumped from {first:.3g} to {level:.3g} within one step, which no update "
            "of the policy explains. Likely causes: another reward function or scale, other or "
            "repeated prompts, or a change of the sampler. If it was intended, announce it with "
            '`monitor.expect("new reward")`; if not, read the completions with the highest rewards'
        )
        return self._report(
            merged.step, reason, value=level, limit=first + least, onset_step=self._steps[1]
        )
