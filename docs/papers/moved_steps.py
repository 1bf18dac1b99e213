"""Section 3.4 of Thinking States: questions with a step that is moved out of its marker's chunk."""

from evaluation.load import build_data
from lightning_models.checkpoint import read_checkpoint

checkpoint = read_checkpoint("runs/gsm/thinking_states")
chunk_size = checkpoint.model_recipe["init_args"]["config"]["chunk_size"]
data = build_data(checkpoint)
data.prepare_data()
data.setup()
moved = {split: data.stored(split).crossings(chunk_size) for split in ("train", "val", "test")}
for split, count in moved.items():
    print(split, count, "of", len(data.stored(split)))
