"""Other people's logs, each read into the same records: CSV, Trainer, TensorBoard, wandb."""

from vitals_collector.replays.histories.columns import History, Wanted
from vitals_collector.replays.histories.recognise import holds_runs, read_history

__all__ = ["History", "Wanted", "holds_runs", "read_history"]
