# Results of the PonderLM-3 paper: `bash docs/papers/ponderlm.sh NAME...` runs functions of this file in the
# project's folder; without a name it lists them. ponderlm.csv says which functions make each table and figure.
set -euo pipefail

runs_70m() {
  # Fig. 3 has no MoR and no pause tokens; MoR's capacities at K = 2 and 4 would be [0.9, 0.8] and [0.9, 0.8, 0.73, 0.66].
  # Plain decoders of K + 1 times the depth have num_layers 18, 24, 30 and 36 for K = 2 to 5.
  for K in 2 3 4; do for M in ponderlm2 ponderlm1 looped; do
    python train.py fit -c configs/ponderlm/${M}_70m.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --model.init_args.config.thinking_steps $K --trainer.default_root_dir runs/ponder_70m/${M}_k$K
  done; done
  python train.py fit -c configs/ponderlm/70m.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --trainer.default_root_dir runs/ponder_70m/ponderlm3_k3
  for K in 2 4 5; do
    python train.py fit -c configs/ponderlm/70m_k$K.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --trainer.default_root_dir runs/ponder_70m/ponderlm3_k$K
  done
  for M in ponderlm_70m ponderlm_70m_x4depth; do
    python train.py fit -c configs/transformer/$M.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --trainer.default_root_dir runs/ponder_70m/$M
  done
}

runs_410m() {
  python train.py fit -c configs/ponderlm/410m.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --data.train_tokens 10000000000 --trainer.default_root_dir runs/ponder_410m/ponderlm3
  for M in ponderlm2 ponderlm1 looped pause mor; do
    python train.py fit -c configs/ponderlm/${M}_410m.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --data.train_tokens 10000000000 --trainer.default_root_dir runs/ponder_410m/$M
  done
  for M in ponderlm_410m ponderlm_410m_x2depth ponderlm_410m_x4depth; do
    python train.py fit -c configs/transformer/$M.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --data.train_tokens 10000000000 --trainer.default_root_dir runs/ponder_410m/$M
  done
}

tasks() {
  for M in ponderlm3 ponderlm2 ponderlm1 looped pause mor ponderlm_410m; do for N in 0 5; do
    python evaluate.py tasks --ckpt runs/ponder_410m/$M --tasks lambada_openai,arc_easy,lambada_standard,arc_challenge,winogrande,piqa,hellaswag,sciq,race --num_fewshot $N --precision bf16 --output runs/ponder_410m/$M/tasks_$N.json
  done; done
}

steps_and_flops() {
  # executed_steps and flops_per_token_6nd of the results.
  for M in ponderlm3 ponderlm2 ponderlm1 looped pause mor; do
    python evaluate.py perplexity --ckpt runs/ponder_410m/$M --precision bf16 --output runs/ponder_410m/$M/perplexity.json
  done
  python evaluate.py compare 'runs/ponder_410m/*' --precision bf16 --output runs/ponder_410m_report
}

allocation() {
  # The paper takes about 10^7 tokens: 1,200 batches of 4 rows of 2,048.
  python train.py validate --ckpt_path runs/ponder_410m/ponderlm3 --trainer.callbacks callbacks.StepAllocation --trainer.callbacks.num_batches 1200
  python evaluate.py sweep --ckpts runs/ponder_410m/ponderlm3 --dial alpha=-4,-2,-1,0,1,2,4 --output runs/ponder_410m_alpha.svg
}

readings() {
  python train.py fit -c configs/ponderlm/70m.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --model.init_args.config.mask_index literal --trainer.default_root_dir runs/ponder_readings/mask_index
  python train.py fit -c configs/ponderlm/70m.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --model.init_args.config.augmentation literal --trainer.default_root_dir runs/ponder_readings/augmentation
  python evaluate.py sweep --ckpts 'runs/ponder_readings/*' --label mask_index,augmentation --output runs/ponder_readings.svg
}

penalties() {
  for P in paper expected_steps; do
    python train.py fit -c configs/ponderlm/70m.yaml -c configs/trainer/gpu.yaml -c configs/data/pile.yaml --model.init_args.config.penalty $P --trainer.default_root_dir runs/ponder_penalties/$P
  done
  python evaluate.py sweep --ckpts 'runs/ponder_penalties/*' --label penalty --output runs/ponder_penalties.svg
}

runs_small() {
  for M in small ponderlm2_small ponderlm1_small looped_small pause_small mor_small; do
    python train.py fit -c configs/ponderlm/$M.yaml --trainer.default_root_dir runs/ponder_small/$M
  done
  for M in ponderlm_small ponderlm_small_x3depth; do
    python train.py fit -c configs/transformer/$M.yaml --trainer.default_root_dir runs/ponder_small/$M
  done
  python evaluate.py compare 'runs/ponder_small/*' --output runs/ponder_small_report
}

tasks_small() {
  # Local files below DATA; near chance. lambada_standard, winogrande, sciq and race exist on the hub only.
  for M in small ponderlm2_small ponderlm1_small looped_small pause_small mor_small ponderlm_small; do for N in 0 5; do
    DATA=data/eval python evaluate.py tasks --ckpt runs/ponder_small/$M --tasks lambada_local,arc_easy_local,arc_challenge_local,piqa_local,hellaswag_local --num_fewshot $N --limit 200 --output runs/ponder_small/$M/tasks_$N.json
  done; done
}

steps_small() {
  for K in 1 3; do
    python train.py fit -c configs/ponderlm/small.yaml --model.init_args.config.thinking_steps $K --trainer.default_root_dir runs/ponder_small_steps/$K
  done
  python evaluate.py sweep --ckpts runs/ponder_small/small 'runs/ponder_small_steps/*' --against thinking_steps --measure loss --label model --output runs/ponder_small_steps.svg
}

readings_small() {
  python train.py fit -c configs/ponderlm/small.yaml --model.init_args.config.mask_index literal --trainer.default_root_dir runs/ponder_small_readings/mask_index
  python train.py fit -c configs/ponderlm/small.yaml --model.init_args.config.augmentation literal --trainer.default_root_dir runs/ponder_small_readings/augmentation
}

penalties_small() {
  for P in paper expected_steps; do
    python train.py fit -c configs/ponderlm/small.yaml --model.init_args.config.penalty $P --trainer.default_root_dir runs/ponder_small_penalties/$P
  done
  python evaluate.py sweep --ckpts runs/ponder_small/small 'runs/ponder_small_penalties/*' --label penalty --output runs/ponder_small_penalties.svg
}

if (($#)); then
  for name; do "$name"; done
else
  declare -F | cut -d" " -f3
fi
