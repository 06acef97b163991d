"""Every key that a config may set, with its default. All other configs override these.

scripts/train --config=configs/default.py --workdir=runs/default
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """The default config: a tiny BERT classifier on WordNet glosses, data-parallel."""
    config = ConfigDict()
    config.seed = 0
    config.task = "classification"  # classification, regression, token_classification, masked_lm, causal_lm
    config.strategy = "data_parallel"  # single, data_parallel, async_data_parallel, pipeline

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # replicas on the data axis; -1: as many as there are devices for
    mesh.stage = 1  # devices of a pipeline
    mesh.virtual_cpu_devices = 0  # split the CPU into this many devices; 0: as XLA_FLAGS says, or one

    config.data_parallel = ConfigDict()
    # shard_map, with any exchange; with ddp also sharding (jit over a mesh, XLA adds gradients up: of float32 models
    # alone, as it does so in their dtype) and pmap; auto: sharding where it may be, which is the fastest on CPUs, else
    # shard_map
    config.data_parallel.implementation = "auto"

    # How replicas agree: ddp, dp, horovod, horovod_adasum, byteps, byteps_onebit, byteps_topk, byteps_randomk,
    # byteps_dithering, bagua_bytegrad, bagua_qadam, bagua_decentralized, bagua_low_precision_decentralized,
    # bagua_model_average, zero1, zero2, zero3, onebit_adam. Pipelines: those that agree on gradients alone.
    config.exchange = "ddp"
    config.exchange_options = exchange = ConfigDict()  # None: the exchange's own; docs/exchanges.md says which it has
    exchange.bucket_bytes = placeholder(int)  # of what is sent at once: buckets, fusion, partitions
    exchange.wire_dtype = placeholder(str)  # float16, bfloat16: of gradients as they are sent
    exchange.algorithm = placeholder(str)  # psum (XLA's own), ring (written out)
    exchange.group = placeholder(int)  # replicas of a node: adds up in it first, then between nodes
    exchange.predivide = placeholder(float)  # divide gradients by this before the sum, and the rest after it
    exchange.backward_passes_per_step = placeholder(int)  # steps of the run for each of the optimizer
    exchange.block = placeholder(int)  # elements that share a scale of bits, or a range of bytes; 0: all
    exchange.ratio = placeholder(float)  # of the elements that topk and randomk send
    exchange.levels = placeholder(int)  # of dithering
    exchange.seed = placeholder(int)  # of random compressors; None: config.seed
    exchange.momentum = placeholder(float)  # Nesterov's, before compression
    exchange.warmup = placeholder(float)  # bagua_qadam, onebit_adam: fraction of the steps before compression
    exchange.interval = placeholder(int)  # bagua_model_average: steps between means
    exchange.offload = placeholder(bool)  # zero: the optimizer's state in the host's memory

    # Of strategy async_data_parallel: workers that take gradients of weights that they have read some time ago.
    config.asynchronous = asynchronous = ConfigDict()
    asynchronous.mode = "emulated"  # in virtual time, from a table; live: by threads (async and ssp)
    asynchronous.table = ""  # the updates.csv of a live run, to be made again
    asynchronous.policy = "async"  # sync, async, ssp, softsync, local_sgd, diloco, model_average
    asynchronous.num_workers = 4  # each takes a part of the batch; as many as you like on any number of devices
    asynchronous.bound = placeholder(int)  # ssp: iterations that a worker may be ahead of the slowest; 3
    asynchronous.groups = placeholder(int)  # softsync: an update for every num_workers / groups gradients; 2
    asynchronous.interval = placeholder(int)  # local_sgd, diloco, model_average: steps from one meeting to the next; 8
    asynchronous.outer_lr = placeholder(float)  # diloco: of the optimizer that takes a round for a gradient; 0.7
    asynchronous.outer_momentum = placeholder(float)  # diloco: Nesterov's, of the same; 0.9
    # What is done about stale gradients, any of: dc_asgd or adaptive_dc_asgd, clip_by_staleness, staleness_aware,
    # corrected_momentum; with commas
    asynchronous.mitigations = ""
    asynchronous.dc_strength = placeholder(float)  # lambda of dc_asgd (0.04), adaptive_dc_asgd (2)
    asynchronous.max_norm = placeholder(float)  # clip_by_staleness: of a gradient that is not stale
    asynchronous.delays = delays = ConfigDict()  # how long things take, in virtual seconds
    delays.distribution = "constant"  # of a gradient's time: constant, uniform, lognormal, pareto, trace
    delays.compute_time = 1.0  # its mean
    delays.spread = 0.0  # uniform: +- so many parts; lognormal: sigma of the logarithm; pareto: the shape, above 1
    delays.slowdown = 1.0  # the last worker's gradients take so many times longer
    delays.communication_time = 0.0  # of weights to a worker, and of a gradient from it
    delays.jitter = 0.0  # a message takes (1 + jitter x exponential) times longer
    delays.trace = ""  # a CSV file of measured times: worker,seconds

    config.pipeline = pipeline = ConfigDict()
    # model_parallel, gpipe, 1f1b, eager_1f1b, interleaved_1f1b, zb_h1, zb_h2, zb_v, or the path of a CSV table
    pipeline.schedule = "1f1b"
    pipeline.num_microbatches = 0  # of a replica's share of the batch; 0: four for each stage (model_parallel: one)
    pipeline.num_chunks = 0  # stages on a device; 0: as few as the schedule can have
    pipeline.partition = "flops"  # uniform, parameters, flops, or the layers that begin stages 1, 2, ..: block_2,head
    # What the backward pass has: full: the inputs of stages, and recomputes; none: all it needs; dots: matrix products
    pipeline.remat = "none"
    pipeline.trace = 0  # draw the actions of this step (the run's first is 1) under the plan: workdir/timeline.png

    config.model = model = ConfigDict()
    model.name = "bert"  # bert, gpt, resnet, vit, mlp, or a module of yours: my_package.my_model
    # bert: tiny mini small base large; gpt: tiny gpt2 gpt2_medium gpt2_large gpt2_xl; resnet: 18 50; mlp: tiny;
    # vit: tiny small base large
    model.size = "tiny"
    model.init_from = ""  # a Hugging Face directory (config.json, safetensors, tokenizer); sets the sizes
    # What follows overrides the size when it is set (None: as the size says).
    model.num_layers = placeholder(int)
    model.hidden_size = placeholder(int)
    model.num_heads = placeholder(int)
    model.num_kv_heads = placeholder(int)  # fewer than num_heads: grouped queries
    model.mlp_size = placeholder(int)
    model.vocab_size = placeholder(int)  # rows of the token embedding; None: the tokenizer's tokens
    model.max_length = placeholder(int)  # learned positions; None: data.max_length
    model.dropout = placeholder(float)
    model.norm = placeholder(str)  # layernorm, rmsnorm
    model.activation = placeholder(str)  # gelu, gelu_tanh, relu, swiglu
    model.positions = placeholder(str)  # learned, rotary
    model.pooling = placeholder(str)  # bert classification and regression, vit: cls, mean
    model.patch_size = placeholder(int)  # vit: height and width of a patch
    # How it is computed; none of these changes the parameters.
    model.dtype = "float32"  # of the computation: float32, bfloat16; weights stay float32
    model.remat = "none"  # none; full: keep only layer inputs; dots: keep matrix products
    model.scan_layers = True  # compile runs of equal layers once
    model.attention = "auto"  # auto, xla, cudnn (bfloat16 on GPU)

    config.data = data = ConfigDict()
    data.source = "wordnet"  # wordnet, csv, tsv, jsonl, parquet, text, mnist, cifar10, synthetic
    data.train = ""  # file (mnist, cifar10: directory); text: one file or a glob
    data.validation = ""  # empty: split off from train by a hash of the example
    data.test = ""  # empty: likewise
    data.validation_fraction = 0.05
    data.test_fraction = 0.1
    data.text_columns = ("text",)  # one column, or two for sentence pairs; token_classification: of the list of words
    data.label_column = "label"  # classification: of the class; token_classification: of the list of tags
    data.target_columns = ("target",)  # regression: of numbers, one or several
    data.tokenizer = ""  # tokenizer.json or vocab.txt; empty: model.init_from's, or trained on the training split
    data.vocab_size = 8192  # of a trained tokenizer
    data.max_length = 64  # tokens; longer texts are cut; language models: the block length
    data.length_buckets = (16, 32, 64, 128, 256, 512)  # texts are padded to the least of these that holds them
    data.mask_fraction = 0.15  # masked_lm: positions to predict
    data.augment = False  # images: random crop and flip
    data.synthetic_examples = 4096
    data.num_threads = 1  # of the loader
    data.prefetch = 8  # batches made ahead

    config.batch_size = 256  # global: over all devices and accumulation steps
    config.num_epochs = 1.0
    config.num_steps = 0  # where not 0, instead of num_epochs

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw, lamb, sgd, adafactor, lion, muon
    optimizer.lr = 1e-3  # the peak
    optimizer.schedule = "cosine"  # constant, cosine, linear: after the warm-up, down to final_lr
    optimizer.warmup = 0.1  # fraction of the steps
    optimizer.final_lr = 0.0  # as a fraction of lr
    optimizer.weight_decay = 0.01  # on matrices only: never on biases, norms
    optimizer.momentum = 0.9  # sgd, muon
    optimizer.b1 = 0.9  # adamw, lamb, lion, and adamw inside muon
    optimizer.b2 = 0.999  # adamw, lamb, lion, and adamw inside muon
    optimizer.eps = 1e-8  # adamw, lamb, and adamw inside muon
    optimizer.clip_norm = 1.0  # of the global gradient; 0: none
    optimizer.accumulation_steps = 1  # microbatches a step, one after another
    optimizer.nonfinite = "stop"  # on a loss or gradient that is not finite: stop the run; skip the step

    config.eval = ConfigDict()
    config.eval.every_steps = 0  # on the validation split; 0: at the end of every epoch
    config.eval.batch_size = 0  # 0: batch_size; a pipeline takes it in gcd(share of a replica, microbatches) parts

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every_steps = 500  # 0: only at the end and on a signal
    checkpoint.asynchronous = True  # written while the next steps compute; else they wait, and no kill loses more steps
    checkpoint.keep = 2  # the last ones
    checkpoint.keep_best = True  # and the one of the best validation loss

    config.log = log = ConfigDict()
    log.every_steps = 20
    log.tensorboard = True
    log.curves = True  # draw curves.png at the end
    log.peak_flops = 0.0  # of one device, for MFU; 0: from the table in jaxpar/measure/flops.py

    # A process that shows no sign of life for so long (seconds) says where it is and ends: longer than any compilation,
    # step or writing of a checkpoint takes, but less than the 1200 that orbax waits for a process that hangs in one,
    # for it says less. Reading the data is not watched. 0: no watchdog
    config.watchdog_seconds = 900.0

    config.profile = (0, 0)  # trace the steps from first to last into workdir/profile
    config.cache_dir = ""  # token arrays and compiled programs; empty: $JAXPAR_CACHE, or ~/.cache/jaxpar
    return config
