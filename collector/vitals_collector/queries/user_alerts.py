"""Alerts of a person's own as they are shown: from when to when each of them held. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainvitals.detect.user_alerts import RENEW_STEPS
from trainvitals.records import Finding


@dataclass(slots=True)
class UserAlertEpisode:
    """One alert from its beginning to when it was last said."""

    newest: Finding
    onset: int
    """The first step at which its condition was true."""
    first: int
    """The step at which it was raised."""
    last: int
    ranks: set[int] = field(default_factory=set)

    def extend(self, finding: Finding) -> None:
        """Take in that it was said again, or by another rank."""
        self.newest, self.last = finding, max(self.last, finding.step)
        self.onset, self.first = min(self.onset, finding.onset_step), min(self.first, finding.step)
        self.ranks |= {finding.rank} - {-1}

    @property
    def where(self) -> str:
        """The ranks that said it, in words; empty where it is the run's."""
        return ", ".join(map(str, sorted(self.ranks)))


def episodes(findings: Iterable[Finding]) -> list[UserAlertEpisode]:
    """Return the run's own alerts by their beginning; what was renewed in time is one."""
    open_episodes: dict[str, UserAlertEpisode] = {}
    closed: list[UserAlertEpisode] = []
    for finding in sorted(findings, key=lambda finding: finding.step):
        if not finding.severity:
            continue
        episode = open_episodes.get(finding.cause)
        # Twice the pause between two of them: one may have been lost, or come of another rank.
        if episode is not None and finding.step - episode.last > 2 * RENEW_STEPS:
            closed.append(episode)
            episode = None
        if episode is None:
            episode = UserAlertEpisode(finding, finding.onset_step, finding.step, finding.step)
            open_episodes[finding.cause] = episode
        episode.extend(finding)
    return sorted([*closed, *open_episodes.values()], key=lambda e: (e.first, e.newest.cause))
