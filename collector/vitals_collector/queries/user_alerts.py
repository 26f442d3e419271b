"""Custom alerts for display: the start and the end of each. Pure."""

from collections.abc import Iterable

import msgspec

from trainvitals.detect.user_alerts import RENEW_STEPS
from trainvitals.records import Finding
from trainvitals.units import name_ranks


class UserAlertEpisode(msgspec.Struct):
    """One alert from its start to its latest repetition."""

    newest: Finding
    onset: int
    """First step at which its condition was true."""
    first: int
    """Step at which it was raised."""
    last: int
    ranks: set[int] = msgspec.field(default_factory=set)

    def extend(self, finding: Finding) -> None:
        """Add to the episode, shown in responses as one alert, a repetition or another rank."""
        self.newest, self.last = finding, max(self.last, finding.step)
        self.onset, self.first = min(self.onset, finding.onset_step), min(self.first, finding.step)
        self.ranks |= {finding.rank} - {-1}

    @property
    def where(self) -> str:
        """Return the ranks that raised the alert, as explanations list them; or ""."""
        return ", ".join(map(str, sorted(self.ranks)))

    @property
    def text(self) -> str:
        """Return the sentence about a custom alert in the explanation of a step or incident."""
        where = f" on {name_ranks(self.ranks)}" if self.ranks else ""
        until = f"s {self.first} to {self.last}" if self.last > self.first else f" {self.first}"
        severity, reason = self.newest.severity, self.newest.reason
        return f"Your alert ({severity}){where} at step{until}: {reason}."


def user_alert_episodes(findings: Iterable[Finding]) -> list[UserAlertEpisode]:
    """Group findings of custom alerts to episodes, to explain a step, a run or an incident."""
    open_episodes: dict[str, UserAlertEpisode] = {}
    closed: list[UserAlertEpisode] = []
    for finding in sorted(findings, key=lambda finding: finding.step):
        if not finding.severity:
            continue
        episode = open_episodes.get(finding.cause)
        # Twice the renewal interval: one finding may be lost, or come from another rank.
        if episode is not None and finding.step - episode.last > 2 * RENEW_STEPS:
            closed.append(episode)
            episode = None
        if episode is None:
            episode = UserAlertEpisode(finding, finding.onset_step, finding.step, finding.step)
            open_episodes[finding.cause] = episode
        episode.extend(finding)
    return sorted([*closed, *open_episodes.values()], key=lambda e: (e.first, e.newest.cause))
