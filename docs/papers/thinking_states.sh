# Results of the Thinking States paper: `bash docs/papers/thinking_states.sh NAME...` runs functions of this file in the
# project's folder; without a name it lists them. thinking_states.csv says which functions make each table and figure.
set -euo pipefail

state_tracking() {
  # Training ends when all validation answers are right, of iCoT and Coconut in their last stage.
  for T in parity vars; do for N in 10 20 40; do
    python train.py fit -c configs/thinking_states/qwen2.5-0.5b_$T.yaml -c configs/trainer/gpu.yaml --data.operations [1,$N] --trainer.default_root_dir runs/$T$N/thinking_states
    for M in cot no_cot icot coconut; do
      python train.py fit -c configs/thinking_states/${M}_qwen2.5-0.5b_$T.yaml -c configs/trainer/gpu.yaml --data.operations [1,$N] --trainer.default_root_dir runs/$T$N/$M
    done
    python evaluate.py reason --ckpt "runs/$T$N/*" --which best --data.test_operations [$N,100] --data.block_size 2048 --figure runs/$T$N.svg --output runs/$T$N.json
  done; done
}

state_tracking_small() {
  # With a random backbone: tiny_ instead of qwen2.5-0.5b_.
  python train.py fit -c configs/thinking_states/tiny_vars.yaml --data.operations [1,20] --trainer.default_root_dir runs/tiny_vars20/thinking_states
  python train.py fit -c configs/thinking_states/coconut_tiny_parity.yaml --data.operations [1,40] --trainer.default_root_dir runs/tiny_parity40/coconut
}

gsm8k() {
  # The paper's GSM8K is GSM8K-Aug; without configs/data/gsm8k_aug.yaml it is the hub's GSM8K. --data.aligned_file
  # aligned.jsonl, on all five lines, takes a teacher's steps and decides which training problems stay. Checkpoints are
  # ranked by val/accuracy; each stage of iCoT and Coconut ranks anew, so --which best is a model of the last stage.
  python train.py fit -c configs/thinking_states/qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --trainer.default_root_dir runs/gsm/thinking_states
  python train.py fit -c configs/thinking_states/no_cot_qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --trainer.default_root_dir runs/gsm/no_cot
  python train.py fit -c configs/thinking_states/cot_qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --trainer.default_root_dir runs/gsm/cot
  python train.py fit -c configs/thinking_states/icot_qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --trainer.default_root_dir runs/gsm/icot
  python train.py fit -c configs/thinking_states/coconut_qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --model.init_args.config.start_from runs/gsm/cot --model.init_args.config.start_which best --model.init_args.config.first_stage 1 --trainer.max_epochs 22 --trainer.default_root_dir runs/gsm/coconut
  python evaluate.py reason --ckpt 'runs/gsm/*' --which best --timing_batch_size 1 --output gsm.json --answers_file answers.jsonl
}

gpt2() {
  # GPT-2 as published (arXiv 2412.06769, 2405.14838): GSM8K test, trained on GSM8K-Aug: Coconut 34.1 %, iCoT 30 %,
  # CoT 42.9 %. Coconut starts from the best CoT. Not run here.
  for M in cot icot coconut; do
    python train.py fit -c configs/trainer/gpu.yaml -c configs/thinking_states/${M}_gpt2_gsm8k.yaml -c configs/data/gsm8k_aug.yaml --trainer.default_root_dir runs/gsm_gpt2/$M
  done
  python evaluate.py reason --ckpt 'runs/gsm_gpt2/*' --which best --timing_batch_size 1
}

gsm8k_small() {
  python train.py fit -c configs/thinking_states/tiny_gsm8k.yaml --data.data_files train.jsonl --data.test_files test.jsonl --trainer.default_root_dir runs/tiny_gsm/thinking_states
  for M in cot no_cot icot coconut; do
    python train.py fit -c configs/thinking_states/${M}_tiny_gsm8k.yaml --data.data_files train.jsonl --data.test_files test.jsonl --trainer.default_root_dir runs/tiny_gsm/${M}_tiny
  done
  python evaluate.py reason --ckpt 'runs/tiny_gsm/*' --which best --timing_batch_size 1
}

two_hop() {
  # Full knowledge is the generated world. Parametric knowledge needs the facts that the base model knows:
  # python docs/papers/known_facts.py writes them to known.jsonl.
  for M in "" cot_ no_cot_ icot_; do
    python train.py fit -c configs/thinking_states/${M}qwen2.5-1.5b_two_hop.yaml -c configs/trainer/gpu.yaml --trainer.default_root_dir runs/fk/${M}two_hop
    python train.py fit -c configs/thinking_states/${M}qwen2.5-1.5b_two_hop.yaml -c configs/trainer/gpu.yaml -c configs/data/two_hop_fact.yaml --data.known_file known.jsonl --data.one_hop false --trainer.default_root_dir runs/pk/${M}two_hop
  done
  python train.py fit -c configs/thinking_states/coconut_qwen2.5-1.5b_two_hop.yaml -c configs/trainer/gpu.yaml --model.init_args.config.start_from runs/fk/cot_two_hop --model.init_args.config.start_which best --model.init_args.config.first_stage 1 --trainer.max_epochs 22 --trainer.default_root_dir runs/fk/coconut_two_hop
  python train.py fit -c configs/thinking_states/coconut_qwen2.5-1.5b_two_hop.yaml -c configs/trainer/gpu.yaml -c configs/data/two_hop_fact.yaml --data.known_file known.jsonl --data.one_hop false --model.init_args.config.start_from runs/pk/cot_two_hop --model.init_args.config.start_which best --model.init_args.config.first_stage 1 --trainer.max_epochs 22 --trainer.default_root_dir runs/pk/coconut_two_hop
  python evaluate.py reason --ckpt 'runs/fk/*' --which best --timing_batch_size 1 --output fk.json
  python evaluate.py reason --ckpt 'runs/pk/*' --which best --timing_batch_size 1 --output pk.json
}

two_hop_small() {
  # The generated world, which iCoT and Coconut read instead of Parity.
  for M in "" cot_ no_cot_; do
    python train.py fit -c configs/thinking_states/${M}tiny_two_hop.yaml --trainer.default_root_dir runs/tiny_fk/${M}two_hop
  done
  python train.py fit -c configs/thinking_states/icot_tiny_parity.yaml --data datamodules.TwoHop --data.tokenizer bpe:1024 --data.block_size 128 --model.init_args.config.removal steps --trainer.max_epochs 15 --trainer.callbacks+ callbacks.AnswerAccuracy --checkpoint.monitor val/accuracy --checkpoint.mode max --trainer.default_root_dir runs/tiny_fk/icot_two_hop
  python train.py fit -c configs/thinking_states/coconut_tiny_parity.yaml --data datamodules.TwoHop --data.tokenizer bpe:1024 --data.block_size 128 --trainer.callbacks+ callbacks.AnswerAccuracy --checkpoint.monitor val/accuracy --checkpoint.mode max --trainer.default_root_dir runs/tiny_fk/coconut_two_hop
  python evaluate.py reason --ckpt 'runs/tiny_fk/*' --which best --timing_batch_size 1
}

latents() {
  # The paper trains each count of latents; --latents asks one checkpoint with several.
  for C in 2 3 4 5 7; do
    python train.py fit -c configs/thinking_states/coconut_qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --model.init_args.config.c_thought $C --model.init_args.config.start_from runs/gsm/cot --model.init_args.config.start_which best --model.init_args.config.first_stage 1 --trainer.max_epochs 22 --trainer.default_root_dir runs/latents/$C
  done
  python evaluate.py reason --ckpt 'runs/latents/*' runs/gsm/cot --which best --against c_thought --figure latents.svg
  python evaluate.py reason --ckpt runs/gsm/coconut runs/gsm/cot --which best --latents 6 9 12 15 21
}

latents_small() {
  for C in 1 2 3; do
    python train.py fit -c configs/thinking_states/coconut_tiny_parity.yaml --model.init_args.config.c_thought $C --trainer.default_root_dir runs/tiny_latents/$C
  done
  python evaluate.py reason --ckpt 'runs/tiny_latents/*' --against c_thought --figure tiny_latents.svg
}

replaced_latents() {
  # The accuracy without what the latents carry: docs/evaluation.md.
  python evaluate.py reason --ckpt runs/gsm/thinking_states runs/gsm/coconut --which best --replace_latents zero noise swap pause
}

depth() {
  # L_out of 28 layers, L_in = 1; the dotted lines of the figure are models without this setting.
  for L in 5 9 13 17 21 25 27; do
    python train.py fit -c configs/thinking_states/qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --model.init_args.config.output_layer $L --trainer.default_root_dir runs/depth/$L
  done
  python evaluate.py reason --ckpt 'runs/depth/*' runs/gsm/no_cot runs/gsm/cot --which best --against recurrence --figure depth.svg
}

depth_small() {
  for L in 2 3 4 5; do
    python train.py fit -c configs/thinking_states/tiny_vars.yaml --model.init_args.config.num_layers 6 --model.init_args.config.output_layer $L --trainer.default_root_dir runs/tiny_depth/$L
  done
  python evaluate.py reason --ckpt 'runs/tiny_depth/*' --against recurrence --figure tiny_depth.svg
}

chunk_size() {
  for C in 2 4 8 16 32 48; do
    python train.py fit -c configs/thinking_states/qwen2.5-1.5b_gsm8k.yaml -c configs/trainer/gpu.yaml -c configs/data/gsm8k_aug.yaml --model.init_args.config.chunk_size $C --trainer.default_root_dir runs/chunk/$C
  done
  python evaluate.py reason --ckpt 'runs/chunk/*' runs/gsm/no_cot runs/gsm/cot --which best --against chunk_size --figure chunks.svg
}

chunk_size_small() {
  for C in 2 4 8 16; do
    python train.py fit -c configs/thinking_states/tiny_vars.yaml --model.init_args.config.chunk_size $C --trainer.default_root_dir runs/tiny_chunk/$C
  done
  python evaluate.py reason --ckpt 'runs/tiny_chunk/*' --against chunk_size --figure tiny_chunks.svg
}

question_first() {
  # Rows grow by their question, so block_size is twice the training's.
  python evaluate.py reason --ckpt runs/gsm/thinking_states --which best --rounds null --answers_file before.jsonl
  python evaluate.py reason --ckpt runs/gsm/thinking_states --which best --rounds null --data.question_first true --data.block_size 2048 --answers_file after.jsonl
  python docs/papers/question_first.py
}

question_first_small() {
  python evaluate.py reason --ckpt runs/tiny_gsm/thinking_states --which best --rounds null --answers_file before.jsonl
  python evaluate.py reason --ckpt runs/tiny_gsm/thinking_states --which best --rounds null --data.question_first true --data.block_size 1536 --answers_file after.jsonl
  python docs/papers/question_first.py
}

overlaps() {
  python evaluate.py reason --ckpt runs/gsm/thinking_states runs/gsm/cot --which best --rounds null --answers_file answers.jsonl
  python docs/papers/overlaps.py
}

moved_steps() {
  python docs/papers/moved_steps.py
}

step_cost() {
  # Queries of 128 tokens in N chunks with 64 tokens of thoughts, and Coconut with N latents; Fig. 6 divides each column
  # of seconds by its first row.
  for N in 2 4 8 16; do
    python -m benchmarks.step --model ThinkingStatesLM --against CoconutLM --rows 1 --length 128 --steps $N --thoughts 64 --device cuda --bf16 \
      --vocab 151936 --config backbone=Qwen/Qwen2.5-1.5B \
      --model_config chunk_size=$((128 / N)) --against_config c_thought=1 max_latent_stage=$N first_stage=$((N + 1))
  done
}

step_cost_small() {
  for N in 2 4 8 16; do
    python -m benchmarks.step --model ThinkingStatesLM --against CoconutLM --rows 1 --length 128 --steps $N --thoughts 64 \
      --model_config chunk_size=$((128 / N)) --against_config c_thought=1 max_latent_stage=$N first_stage=$((N + 1))
  done
}

if (($#)); then
  for name; do "$name"; done
else
  declare -F | cut -d" " -f3
fi
