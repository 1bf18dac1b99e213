# Results of the Thoughtbubbles paper: `bash docs/papers/thoughtbubbles.sh NAME...` runs functions of this file in the
# project's folder; without a name it lists them. thoughtbubbles.csv says which functions make each table and figure.
set -euo pipefail

runs() {
  # One run per model, size and corpus, on one GPU. With `configs/trainer/ddp.yaml` and `--trainer.devices 8` each
  # keeps its 64 windows a step. `compare` then scores blockwise, as the paper does.
  for D in openwebtext_nanogpt pes2o; do for S in 150m 319m 772m; do
    python train.py fit -c configs/transformer/thoughtbubbles_$S.yaml -c configs/data/$D.yaml -c configs/trainer/gpu.yaml --trainer.default_root_dir runs/$D/$S/plain
    python train.py fit -c configs/thoughtbubbles/copy3_$S.yaml -c configs/data/$D.yaml -c configs/trainer/gpu.yaml --trainer.default_root_dir runs/$D/$S/copy3
    python train.py fit -c configs/thoughtbubbles/copy5_$S.yaml -c configs/data/$D.yaml -c configs/trainer/gpu.yaml --trainer.default_root_dir runs/$D/$S/copy5
    python train.py fit -c configs/thoughtbubbles/$S.yaml -c configs/data/$D.yaml -c configs/trainer/gpu.yaml --trainer.default_root_dir runs/$D/$S/bubbles2
    python train.py fit -c configs/thoughtbubbles/$S.yaml -c configs/data/$D.yaml -c configs/trainer/gpu.yaml --model.init_args.config.kappa 4L --trainer.default_root_dir runs/$D/$S/bubbles4
  done; done
}

runs_small() {
  # Python's documentation, six layers of width 192.
  python train.py fit -c configs/transformer/small.yaml --trainer.default_root_dir runs/bubbles_small/plain
  for M in copy3 copy5; do
    python train.py fit -c configs/thoughtbubbles/${M}_small.yaml --trainer.default_root_dir runs/bubbles_small/$M
  done
  for K in 2 4; do
    python train.py fit -c configs/thoughtbubbles/small.yaml --model.init_args.config.kappa ${K}L --trainer.default_root_dir runs/bubbles_small/bubbles$K
  done
  python evaluate.py compare 'runs/bubbles_small/*' --output runs/bubbles_small_report
}

pes2o_small() {
  # Three million tokens of the training split, from the hub.
  python train.py fit -c configs/transformer/small.yaml -c configs/data/pes2o.yaml --data.train_tokens 3000000 --trainer.default_root_dir runs/pes2o_small/plain
  python train.py fit -c configs/thoughtbubbles/copy3_small.yaml -c configs/data/pes2o.yaml --data.train_tokens 3000000 --trainer.default_root_dir runs/pes2o_small/copy3
  python train.py fit -c configs/thoughtbubbles/small.yaml -c configs/data/pes2o.yaml --data.train_tokens 3000000 --trainer.default_root_dir runs/pes2o_small/bubbles2
  python evaluate.py compare 'runs/pes2o_small/*' --output runs/pes2o_small_report --limit_batches 200
}

tasks() {
  # The paper's rules (Appendix E); without `_thoughtbubbles` the harness' own. Budgets are dynamic.
  for D in openwebtext_nanogpt pes2o; do for S in 150m 319m 772m; do for M in plain copy3 copy5 bubbles2 bubbles4; do
    python evaluate.py tasks --ckpt runs/$D/$S/$M --tasks lambada_thoughtbubbles,hellaswag_thoughtbubbles,blimp_thoughtbubbles,piqa_thoughtbubbles --precision bf16 --output runs/$D/$S/$M/tasks.json
  done; done; done
}

tasks_small() {
  # Local files below DATA; models of this size score near chance.
  for M in plain copy3 copy5 bubbles2 bubbles4; do
    DATA=data/eval python evaluate.py tasks --ckpt runs/bubbles_small/$M --tasks lambada_thoughtbubbles_local,hellaswag_thoughtbubbles_local,blimp_thoughtbubbles_local,piqa_thoughtbubbles_local --limit 500 --output runs/bubbles_small/$M/tasks.json
  done
}

forks() {
  # Figures and CSV files of the forks of tokens, in the run's log folder.
  python train.py validate --ckpt_path runs/openwebtext_nanogpt/772m/bubbles2 --trainer.callbacks callbacks.ForkAnalysis --trainer.callbacks.reference_ckpt runs/openwebtext_nanogpt/772m/plain
}

autoregression() {
  # --positions draws that many targets; the blockwise score of the same targets is reported, too.
  for B in fixed dynamic; do
    python evaluate.py perplexity --ckpt runs/openwebtext_nanogpt/772m/bubbles2 --mode autoregressive --budget $B --positions 20000 --output runs/openwebtext_nanogpt/772m/$B.json
  done
  python evaluate.py perplexity --ckpt runs/openwebtext_nanogpt/772m/plain --mode autoregressive --positions 20000 --output runs/openwebtext_nanogpt/772m/plain.json
  python evaluate.py sweep --ckpts runs/openwebtext_nanogpt/772m/bubbles2 --dial kappa=1L,2L,4L --output runs/openwebtext_nanogpt/772m/kappas.svg
}

kinship() {
  python train.py fit -c configs/thoughtbubbles/150m.yaml -c configs/data/kinship.yaml -c configs/trainer/gpu.yaml --trainer.max_steps 5000 --trainer.default_root_dir runs/kinship/bubbles2
  python train.py validate --ckpt_path runs/kinship/bubbles2 --trainer.callbacks callbacks.ForkAnalysis
  python evaluate.py reason --ckpt runs/kinship/bubbles2 --rounds null --output runs/kinship/answers.json
}

kinship_small() {
  python train.py fit -c configs/thoughtbubbles/small.yaml -c configs/data/kinship.yaml --trainer.default_root_dir runs/kinship_small/bubbles2
  python train.py validate --ckpt_path runs/kinship_small/bubbles2 --trainer.callbacks callbacks.ForkAnalysis
  python evaluate.py reason --ckpt runs/kinship_small/bubbles2 --rounds null
}

overforking() {
  python train.py fit -c configs/thoughtbubbles/772m.yaml -c configs/data/openwebtext_nanogpt.yaml -c configs/trainer/gpu.yaml --trainer.max_steps 25000 --trainer.default_root_dir runs/overfork/three
  python train.py fit -c configs/thoughtbubbles/overfork_772m.yaml -c configs/data/openwebtext_nanogpt.yaml -c configs/trainer/gpu.yaml --trainer.default_root_dir runs/overfork/all
  python evaluate.py compare 'runs/overfork/*' --output runs/overfork_report
}

overforking_small() {
  python train.py fit -c configs/thoughtbubbles/small.yaml --model.init_args.config.fork_layers [1,2] --trainer.default_root_dir runs/overfork_small/early
  python train.py fit -c configs/thoughtbubbles/small.yaml --model.init_args.config.fork_layers [1,2,3,4,5] --trainer.default_root_dir runs/overfork_small/all
  python evaluate.py compare 'runs/overfork_small/*' --output runs/overfork_small_report
}

if (($#)); then
  for name; do "$name"; done
else
  declare -F | cut -d" " -f3
fi
