"""Samples that do not fit the policy: updates that are too large, and a sampler that differs.

Both have absolute limits: a healthy run is far below them, whatever its task.
"""

from collections.abc import Sequence

from trainvitals.detect.fleet.base import MergedStep
from trainvitals.detect.posttraining import names
from trainvitals.detect.posttraining.base import (
    PostTrainingWatcher,
    ShareCourse,
    ShortLevel,
    ValueCourse,
    quantity,
)
from trainvitals.detect.posttraining.settings import PostTrainingConfig
from trainvitals.records import Finding

_TIMES_USUAL = 3.0
"""Multiple of the highest level of the gap from which two values are enough."""
_TOO_LARGE = (
    ". Likely causes: a learning rate that is too high, too many updates per batch of samples, or "
    "samples of an old policy. Lower the learning rate or the number of updates per batch"
)


class PolicyRatioWatcher(PostTrainingWatcher):
    """Reports updates that move the policy too far from the one that sampled the batch.

    Half of the tokens are clipped over 10 values, or the mean probability ratio is beyond 2 or
    below 1/2. Without either quantity it abstains.
    """

    name = "policy_ratio"
    STATE = ("_clipped", "_ratio")

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._clipped = ShareCourse(self._config.window)
        self._ratio = ShortLevel()

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the clipped shares and probability ratios that a restart resets."""
        return (self._clipped, self._ratio)

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge clipped tokens and probability ratio of a logged step of the policy."""
        clipped, ratio = quantity(merged, names.CLIP_SHARE), quantity(merged, names.RATIO)
        self._clipped.add(clipped, merged.step)
        level = None if ratio is None or ratio <= 0.0 else self._ratio.add(ratio, merged.step)
        mean, config = self._clipped.mean, self._config
        if level is not None and not 1.0 / config.ratio_times <= level <= config.ratio_times:
            what = f"the mean probability ratio of the updates is {level:.3g} instead of about 1"
            return self._begin_condition(
                merged,
                what + _TOO_LARGE,
                cause="policy_ratio",
                value=level,
                limit=config.ratio_times,
            )
        if clipped is not None and mean is not None and mean >= config.clip_share:
            what = f"{mean:.0%} of the tokens are clipped, so most of each batch has no effect"
            return self._begin_condition(
                merged,
                what + _TOO_LARGE,
                cause="clip_saturated",
                value=mean,
                limit=config.clip_share,
            )
        return () if mean is None and level is None else self._end_condition()


class SamplerGapWatcher(PostTrainingWatcher):
    """Reports a sampler whose log-probabilities differ from the trainer's.

    The mean absolute difference per token is at least 0.1, as a median of five values; twice in a
    row is enough if both are three times as high as any median so far. Without it the detector
    abstains.
    """

    name = "sampler_gap"
    STATE = ("_gap",)

    def __init__(self, config: PostTrainingConfig | None = None) -> None:
        super().__init__(config)
        self._gap = ShortLevel()

    def _courses(self) -> Sequence[ValueCourse]:
        """Return the gaps between sampler and trainer that a restart resets."""
        return (self._gap,)

    def _judge(self, merged: MergedStep) -> tuple[Finding, ...]:
        """Judge a logged step's gap between the log-probabilities of sampler and trainer."""
        gap = quantity(merged, names.SAMPLER_GAP)
        level = None if gap is None else self._gap.add(gap, merged.step)
        if level is None:
            return ()
        limit, latest = self._config.sampler_gap, self._gap.lowest_of_latest
        if latest >= _TIMES_USUAL * (self._gap.highest or 0.0):
            level = max(level, latest)
        if level < limit:
            return self._end_condition()
        reason = (
            f"trainer and sampler differ by {level:.3g} in the mean log-probability of a "
            "token, so the samples are not from the policy that is trained. Likely causes: "
            "weights that were not sent to the sampler, another precision, quantization, "
            "temperature or chat template in one of them, or asynchronous samples that are "
            "too old. Compare the log-probabilities of one prompt in both"
        )
        return self._begin_condition(merged, reason, value=level, limit=limit)
