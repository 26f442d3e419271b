"""Limits of the data kept per run."""

from trainvitals.config import AtLeastOne, Count, NotNegative, Settings


class VolumeSettings(Settings, frozen=True, kw_only=True):
    """Limits of the data kept per run."""

    section = "volumes"

    keep_hours: NotNegative = 24.0
    """Hours for which every row stays unchanged, if the cap allows it."""
    max_run_bytes: Count = 5_000_000_000
    """A run above it loses rows sooner, oldest first; 0 is no cap."""
    keep_days: NotNegative = 0.0
    """Delete whole runs this many days after their end; 0 keeps them forever."""
    window_steps: AtLeastOne = 500
    """Rows of ranks and layers are rolled up by windows of this many steps, rounded up to multiples
    of 256."""
    margin_steps: int = 500
    """Windows this near to a decision or an actionable finding stay complete."""
    num_worst_ranks: int = 8
    """Ranks whose rows a rolled-up window keeps, in addition to rank 0."""
    layer_steps: AtLeastOne = 10
    """Keep the first of every ``layer_steps`` steps of layers, unless a finding is near."""
    host_seconds: AtLeastOne = 60
    """Samples of a GPU, node or process within this many seconds become two: minimum and
    maximum."""
    margin_seconds: float = 600.0
    """Hours of samples this near to a decision or an actionable finding stay complete."""
