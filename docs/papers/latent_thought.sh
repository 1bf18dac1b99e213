# Results of the Latent-Thought paper: `bash docs/papers/latent_thought.sh NAME...` runs functions of this file in the
# project's folder; without a name it lists them. latent_thought.csv says which functions make each table and figure.
set -euo pipefail

runs() {
  # Table 1 scores LTM-Large after 0.9 B tokens, at step 1,717: this checkpoint is kept for `zero_shot`.
  for M in small medium; do
    python train.py fit -c configs/latent_thought/ltm_$M.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --trainer.default_root_dir runs/ltm/$M
  done
  python train.py fit -c configs/latent_thought/ltm_large.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --checkpoint.save_top_k -1 --checkpoint.every_n_train_steps 1717 --trainer.default_root_dir runs/ltm/large
  python train.py fit -c configs/transformer/ltm_76m.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --trainer.default_root_dir runs/ltm/ar
}

readings() {
  # N_z = 24 latent vectors a layer, and the choices of the public code.
  for M in small_nz_per_layer medium_nz_per_layer large_nz_per_layer large_public public; do
    python train.py fit -c configs/latent_thought/ltm_$M.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --trainer.default_root_dir runs/ltm_readings/$M
  done
}

runs_small() {
  # Python's documentation.
  python train.py fit -c configs/latent_thought/tiny.yaml --trainer.default_root_dir runs/ltm_tiny
  python train.py fit -c configs/transformer/tiny.yaml --trainer.default_root_dir runs/ar_tiny
}

inner_steps() {
  # The ranges that the paper's text names; its grid is in a plot only.
  for M in small medium large; do for T in 8 16 32 64; do
    python train.py fit -c configs/latent_thought/ltm_$M.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --model.init_args.config.inner_steps $T --trainer.default_root_dir runs/ltm_steps/${M}_$T
  done; done
  python evaluate.py compare 'runs/ltm_steps/*' --output runs/ltm_steps_report
  python evaluate.py sweep --ckpts runs/ltm/large --dial inner_steps=0,16,32,64,128 --output runs/ltm_steps_at_test_time.svg
}

latent_sizes() {
  for Z in 96 192; do
    python train.py fit -c configs/latent_thought/ltm_large_$Z.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --trainer.default_root_dir runs/ltm_latents/$Z
  done
  python evaluate.py compare runs/ltm/large 'runs/ltm_latents/*' --output runs/ltm_latents_report
}

latent_sizes_small() {
  for Z in 1 2 8; do
    python train.py fit -c configs/latent_thought/small_study.yaml --model.init_args.config.latents_per_layer $Z --trainer.default_root_dir runs/ltm_small_latents/$Z
  done
  python evaluate.py compare 'runs/ltm_small_latents/*' --output runs/ltm_small_latents_report
}

shares() {
  # The first command needs no weights; the second reads trained models.
  python docs/papers/shares.py
  python evaluate.py compare runs/ltm/small runs/ltm/medium runs/ltm/large --output runs/ltm_shares
}

zero_shot() {
  for M in small medium ar; do
    python evaluate.py zero_shot --ckpt runs/ltm/$M --output runs/ltm/${M}_zero_shot.json
  done
  python evaluate.py zero_shot --ckpt runs/ltm/large/LatentThoughtLM/version_0/checkpoints/step=1717.ckpt --output runs/ltm/large_zero_shot.json
}

gpt2() {
  # The harness' own beam search (five beams of up to 50 tokens) takes the best beam: pass@1, where the paper has pass@5.
  # runs/ltm/ar is exported and asked in the same way.
  for M in medium large; do
    python evaluate.py import --hf gpt2-$M --output runs/gpt2/$M.ckpt
    python evaluate.py zero_shot --ckpt runs/gpt2/$M.ckpt --block_size 1024 --batch_size 8 --cache_dir data_cache --output runs/gpt2/${M}_zero_shot.json
    python evaluate.py quality --ckpt runs/gpt2/$M.ckpt --data datamodules.OpenWebText --data.tokenizer gpt2 --data.block_size 1024 --data.batch_size 8 --sampling nucleus multinomial --output runs/gpt2/${M}_quality.json
    for K in 0 5; do
      python evaluate.py tasks --ckpt runs/gpt2/$M.ckpt --tasks gsm8k_pass_at_k --num_fewshot $K --output runs/gpt2/${M}_gsm8k_$K.json
    done
    python evaluate.py export --ckpt runs/gpt2/$M.ckpt --output runs/gpt2/${M}_hf
    for K in 0 5; do
      python -m lm_eval --model hf --model_args pretrained=runs/gpt2/${M}_hf,add_bos_token=true --include_path configs/tasks --tasks gsm8k_beam --num_fewshot $K --batch_size 8 --output_path runs/gpt2/${M}_gsm8k_beam_$K
    done
  done
}

gsm8k() {
  for M in ltm/small ltm/medium ltm/large ltm_latents/192; do for K in 0 5; do
    python evaluate.py tasks --ckpt runs/$M --tasks gsm8k_pass_at_k --num_fewshot $K --output runs/${M}_gsm8k_$K.json
  done; done
}

unconditional() {
  for M in small medium large; do
    python evaluate.py quality --ckpt runs/ltm/$M --mode unconditional --output runs/ltm/${M}_samples.json --texts runs/ltm/${M}_samples.jsonl
  done
}

inference() {
  for M in langevin_76m vae_114m; do
    python train.py fit -c configs/latent_thought/$M.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --trainer.default_root_dir runs/ltm_inference/$M
    python evaluate.py perplexity --ckpt runs/ltm_inference/$M --output runs/ltm_inference/$M.json
    python evaluate.py quality --ckpt runs/ltm_inference/$M --mode unconditional --output runs/ltm_inference/${M}_samples.json
  done
}

priors() {
  for M in shared transport; do
    python train.py fit -c configs/latent_thought/ltm_large_$M.yaml -c configs/trainer/gpu.yaml -c configs/data/openwebtext.yaml --trainer.default_root_dir runs/ltm_priors/$M
  done
  python evaluate.py compare runs/ltm/large 'runs/ltm_priors/*' --output runs/ltm_priors_report
}

priors_small() {
  python train.py fit -c configs/latent_thought/small_study.yaml --trainer.default_root_dir runs/ltm_small_priors/layered
  python train.py fit -c configs/latent_thought/small_study.yaml --model.init_args.config.latents shared --trainer.default_root_dir runs/ltm_small_priors/shared
  python train.py fit -c configs/latent_thought/small_study.yaml --model.init_args.config.prior transport --trainer.default_root_dir runs/ltm_small_priors/transport
  python evaluate.py compare 'runs/ltm_small_priors/*' --output runs/ltm_small_priors_report
}

if (($#)); then
  for name; do "$name"; done
else
  declare -F | cut -d" " -f3
fi
