"""What is kept of runs, and for how long."""

from trainvitals.config import AtLeastOne, Count, NotNegative, Settings


class VolumeSettings(Settings, frozen=True, kw_only=True):
    """What is kept of a run, and for how long."""

    section = "volumes"

    keep_hours: NotNegative = 24.0
    """How long every row stays as it came, where the cap allows it."""
    max_run_bytes: Count = 5_000_000_000
    """A run above it is thinned sooner, oldest rows first; 0 is no cap."""
    keep_days: NotNegative = 0.0
    """Whole runs are removed so long after their end; 0 keeps them for ever."""
    window_steps: AtLeastOne = 500
    """Rows of ranks and layers are thinned by windows of so many steps: of as many stretches of 256
    as these need."""
    margin_steps: int = 500
    """Windows so near to a decision or an acting finding stay whole for ever."""
    num_worst_ranks: int = 8
    """Ranks whose whole rows a thinned window keeps, beside rank 0."""
    layer_steps: AtLeastOne = 10
    """Layers keep the first of so many steps, where no finding is near."""
    host_seconds: AtLeastOne = 60
    """The samples of a GPU, node or process of so many seconds become two: the least and the
    greatest values."""
    margin_seconds: float = 600.0
    """Hours of samples so near to a decision or an acting finding stay whole for ever."""


__all__ = ["VolumeSettings"]
