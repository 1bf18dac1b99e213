# Results of the Thought Gestalt paper: `bash docs/papers/thought_gestalt.sh NAME...` runs functions of this file in the
# project's folder; without a name it lists them. thought_gestalt.csv says which functions make each table and figure.
set -euo pipefail

runs() {
  # Sentences are split by SaT, whose weights come from the hub; without a network add --data.init_args.splitter rules or
  # sat:FOLDER. --which best takes the checkpoint of the lowest validation loss, as the paper does.
  for D in 12m 20m 30m 50m; do
    python train.py fit -c configs/thought_gestalt/85m.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103_sentences_$D.yaml --trainer.callbacks+ callbacks.GateAnalysis --trainer.default_root_dir runs/tg/$D/gestalt
    python train.py fit -c configs/transformer/tg_85m.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103.yaml --data.train_tokens ${D%m}000000 --trainer.default_root_dir runs/tg/$D/gpt2
    for M in gestalt gpt2; do
      python evaluate.py perplexity --ckpt runs/tg/$D/$M --which best --split test --output runs/tg/$D/$M.json
    done
  done
}

widths() {
  for W in w48 w96 w192 w384; do
    python train.py fit -c configs/thought_gestalt/$W.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103_sentences_50m.yaml --trainer.callbacks+ callbacks.GateAnalysis --trainer.default_root_dir runs/tg_width/$W/gestalt
    python train.py fit -c configs/transformer/tg_$W.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103.yaml --trainer.default_root_dir runs/tg_width/$W/gpt2
    for M in gestalt gpt2; do
      python evaluate.py perplexity --ckpt runs/tg_width/$W/$M --which best --split test --output runs/tg_width/$W/$M.json
    done
  done
}

fits() {
  python evaluate.py scaling 'GPT-2=runs/tg/*/gpt2.json' 'TG=runs/tg/*/gestalt.json' --x tokens --baseline GPT-2 --plot runs/tg/tokens.png
  python evaluate.py scaling 'GPT-2=runs/tg_width/*/gpt2.json' 'TG=runs/tg_width/*/gestalt.json' --x parameters --baseline GPT-2 --plot runs/tg_width/parameters.png
}

baselines() {
  for D in 20m 30m 50m; do
    for M in boundaries gist; do
      python train.py fit -c configs/thought_gestalt/${M}_85m.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103_sentences_$D.yaml --trainer.default_root_dir runs/tg/$D/$M
      python evaluate.py perplexity --ckpt runs/tg/$D/$M --which best --split test --output runs/tg/$D/$M.json
    done
    for N in 25 50 75; do
      python train.py fit -c configs/thought_gestalt/spans${N}_85m.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103_sentences_$D.yaml --trainer.default_root_dir runs/tg/$D/spans$N
      python evaluate.py perplexity --ckpt runs/tg/$D/spans$N --which best --split test --output runs/tg/$D/spans$N.json
    done
  done
  python evaluate.py scaling 'GPT-2=runs/tg/*/gpt2.json' 'TG=runs/tg/*/gestalt.json' 'boundaries=runs/tg/*/boundaries.json' 'gist=runs/tg/*/gist.json' 'spans 25=runs/tg/*/spans25.json' 'spans 50=runs/tg/*/spans50.json' 'spans 75=runs/tg/*/spans75.json' --x tokens --plot runs/tg/baselines.png
}

ablations() {
  # Throughput is logged as throughput/tokens_per_second.
  python train.py fit -c configs/thought_gestalt/85m.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103_sentences_30m.yaml --trainer.default_root_dir runs/tg_ablations/gestalt
  for A in serial parallel no_memory detached in_context last_layer static_bos no_eos_weight fixed_streams max_32; do
    python train.py fit -c configs/thought_gestalt/85m_$A.yaml -c configs/trainer/gpu.yaml -c configs/data/wikitext103_sentences_30m.yaml --trainer.default_root_dir runs/tg_ablations/$A
  done
  python evaluate.py compare 'runs/tg_ablations/*' --which best --split test --output runs/tg_ablations_report
}

reversal() {
  for D in 12m 20m 30m 50m; do for M in gestalt gpt2; do
    python evaluate.py reversal --ckpt runs/tg/$D/$M --which best --output runs/tg/$D/${M}_reversal.json --plot runs/tg/$D/${M}_reversal.png
  done; done
  for Y in reversed_target reversed_margin normal_target; do
    python evaluate.py scaling 'GPT-2=runs/tg/*/gpt2_reversal.json' 'TG=runs/tg/*/gestalt_reversal.json' --x tokens --y $Y --law log --plot runs/tg/$Y.png
  done
}

reversal_public() {
  python evaluate.py reversal --hf gpt2-xl --output runs/gpt2-xl_reversal.json
  python evaluate.py reversal --hf mistralai/Mistral-7B-v0.1 --precision bf16 --output runs/mistral_reversal.json
}

gates() {
  # How far gradients reach, and what memory attention reads, on the longest validation documents.
  python train.py validate --ckpt_path runs/tg/50m/gestalt --trainer.callbacks callbacks.GateAnalysis
}

data_small() {
  # Half a million to two million tokens, from the hub or from --data.corpus.data_files.
  for D in 500000 1000000 2000000; do
    python train.py fit -c configs/thought_gestalt/small.yaml -c configs/data/wikitext103_sentences_12m.yaml --data.init_args.corpus.init_args.train_tokens $D --trainer.default_root_dir runs/tg_small_data/$D/gestalt
    python train.py fit -c configs/transformer/small.yaml -c configs/data/wikitext103.yaml --data.tokenizer gpt2 --data.train_tokens $D --data.report lexical --trainer.default_root_dir runs/tg_small_data/$D/gpt2
    for M in gestalt gpt2; do
      python evaluate.py perplexity --ckpt runs/tg_small_data/$D/$M --which best --split test --output runs/tg_small_data/$D/$M.json
    done
  done
  python evaluate.py scaling 'GPT-2=runs/tg_small_data/*/gpt2.json' 'TG=runs/tg_small_data/*/gestalt.json' --x tokens --baseline GPT-2
}

widths_small() {
  # Python's documentation; gates are logged.
  for W in 48 96 192; do
    python train.py fit -c configs/thought_gestalt/small.yaml --model.init_args.config.dim $W --trainer.callbacks+ callbacks.GateAnalysis --trainer.default_root_dir runs/tg_small_width/$W/gestalt
    python train.py fit -c configs/transformer/small.yaml --model.init_args.config.dim $W --data.report lexical --trainer.default_root_dir runs/tg_small_width/$W/gpt2
    for M in gestalt gpt2; do
      python evaluate.py perplexity --ckpt runs/tg_small_width/$W/$M --which best --split test --output runs/tg_small_width/$W/$M.json
    done
  done
  python evaluate.py scaling 'GPT-2=runs/tg_small_width/*/gpt2.json' 'TG=runs/tg_small_width/*/gestalt.json' --x parameters --baseline GPT-2
}

baselines_small() {
  # The 85M files at the size of small.yaml.
  python train.py fit -c configs/thought_gestalt/small.yaml --trainer.default_root_dir runs/tg_small/gestalt
  python train.py fit -c configs/transformer/tg_85m.yaml --model.init_args.config.num_layers 6 --model.init_args.config.dim 192 --model.init_args.config.num_heads 6 --model.init_args.config.init_std 0.05 --model.init_args.config.attention_dropout 0 --model.init_args.optimizer.lr 2e-3 --data.tokenizer bpe:2048 --data.block_size 512 --trainer.max_epochs 6 --trainer.default_root_dir runs/tg_small/gpt2
  for M in boundaries gist; do
    python train.py fit -c configs/thought_gestalt/${M}_85m.yaml --model.init_args.config.num_layers 6 --model.init_args.config.dim 192 --model.init_args.config.num_heads 6 --model.init_args.config.init_std 0.05 --model.init_args.config.attention_dropout 0 --model.init_args.optimizer.lr 2e-3 --data.init_args.corpus.init_args.tokenizer bpe:2048 --data.init_args.block_size 512 --trainer.max_epochs 6 --trainer.default_root_dir runs/tg_small/$M
  done
  for N in 25 50 75; do
    python train.py fit -c configs/thought_gestalt/small.yaml --data.init_args.splitter spans:$N --data.init_args.max_sentence_tokens $N --trainer.default_root_dir runs/tg_small/spans$N
  done
  python evaluate.py compare 'runs/tg_small/*' --which best --split test --output runs/tg_small_report
}

ablations_small() {
  # Python's documentation; the study has the other ablations.
  python train.py fit -c configs/thought_gestalt/small.yaml --trainer.default_root_dir runs/tg_small/gestalt
  python train.py fit -c configs/thought_gestalt/small.yaml --model.init_args.config.layer_type serial --trainer.default_root_dir runs/tg_small/serial
  python train.py fit -c configs/thought_gestalt/small.yaml --model.init_args.config.layer_type parallel --trainer.default_root_dir runs/tg_small/parallel
  python train.py fit -c configs/thought_gestalt/small.yaml --model.init_args.config.memory in_context --trainer.default_root_dir runs/tg_small/in_context
  python train.py fit -c configs/thought_gestalt/small.yaml --model.init_args.config.sentence_layer 6 --trainer.default_root_dir runs/tg_small/last_layer
  python train.py fit -c configs/thought_gestalt/small.yaml --model.init_args.config.context_seeding false --trainer.default_root_dir runs/tg_small/static_bos
  python train.py fit -c configs/thought_gestalt/small.yaml --model.init_args.config.eos_weight 1 --trainer.default_root_dir runs/tg_small/no_eos_weight
  python train.py fit -c configs/thought_gestalt/small.yaml --data.init_args.max_sentences 40 --data.init_args.curriculum_step 0 --trainer.default_root_dir runs/tg_small/fixed_streams
  python train.py fit -c configs/thought_gestalt/small.yaml --data.init_args.max_sentence_tokens 32 --trainer.default_root_dir runs/tg_small/max_32
  python evaluate.py compare 'runs/tg_small/*' --which best --split test --output runs/tg_small_report
}

reversal_small() {
  # Names must be single tokens: take the runs of data_small, whose vocabulary is GPT-2's. So little text teaches a model
  # next to nothing about sons; the commands show that probe and fits run.
  for D in 500000 1000000 2000000; do for M in gestalt gpt2; do
    python evaluate.py reversal --ckpt runs/tg_small_data/$D/$M --which best --pairs 200 --output runs/tg_small_data/$D/${M}_reversal.json
  done; done
  for Y in reversed_target reversed_margin normal_target; do
    python evaluate.py scaling 'GPT-2=runs/tg_small_data/*/gpt2_reversal.json' 'TG=runs/tg_small_data/*/gestalt_reversal.json' --x tokens --y $Y --law log
  done
}

if (($#)); then
  for name; do "$name"; done
else
  declare -F | cut -d" " -f3
fi
