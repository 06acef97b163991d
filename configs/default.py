"""All config keys with their defaults. The other configs start from these values and override some of them.

scripts/train --config=configs/default.py --workdir=runs/default
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder


def get_config() -> ConfigDict:
    """Return the default config: a tiny BERT classifier on WordNet glosses, trained data-parallel."""
    config = ConfigDict()
    config.seed = 0  # seed of initial parameters, example order, dropout, masking, augmentation, emulated delays
    # What is trained: classification, regression, token_classification, masked_lm, causal_lm
    config.task = "classification"
    # single, data_parallel, async_data_parallel, pipeline, swarm; auto: the planner chooses single, data_parallel or
    # pipeline for the devices of the run, with mesh, exchange, microbatches, schedule and remat (docs/howto/planner.md)
    config.strategy = "data_parallel"
    config.chosen = ""  # set by jaxpar: what was chosen for each `auto`, and why
    config.planned_for = ""  # set by strategy auto: the devices for which it chose; a resumed run then keeps the choice

    config.mesh = mesh = ConfigDict()  # devices: the axes of the mesh, and virtual CPU devices
    mesh.data = -1  # size of the data axis (number of replicas); -1: as many as the devices allow
    mesh.stage = 1  # size of the stage axis: devices in a pipeline; more than 1 only with strategy pipeline
    # Size of the tensor axis: neighbouring devices, each with a part of every layer (docs/howto/tensor.md)
    mesh.tensor = 1
    # Size of the context axis: devices that each have a part of the positions of every text (docs/howto/tensor.md)
    mesh.context = 1
    mesh.virtual_cpu_devices = 0  # split the CPU into this many devices; 0: the number in XLA_FLAGS, otherwise 1

    config.data_parallel = ConfigDict()  # strategy data_parallel
    # How a step is distributed over devices.
    # shard_map: the exchange is explicit in the program; supports every exchange.
    # sharding: jit over sharded inputs, where XLA inserts the collectives; supports only exchange ddp without options
    #   and, on several replicas, only float32 models, because XLA sums gradients in the dtype of the model.
    # pmap: supports only exchange ddp without options.
    # auto: sharding (the fastest on CPUs) if it sums gradients once and in float32, otherwise shard_map.
    config.data_parallel.implementation = "auto"

    # How replicas exchange gradients or weights: ddp, dp, horovod, horovod_adasum, byteps, byteps_onebit, byteps_topk,
    # byteps_randomk, byteps_dithering, bagua_bytegrad, bagua_qadam, bagua_decentralized,
    # bagua_low_precision_decentralized, bagua_model_average, zero1, zero2, zero3, hsdp, onebit_adam,
    # powersgd.
    # Pipelines support the exchanges of gradients (ddp, horovod, byteps with its compressors, bagua_bytegrad) and
    # zero1, with pipeline.executor=dispatch also zero2, zero3 and hsdp.
    config.exchange = "ddp"
    # Options of the exchange. None: the default of the exchange. docs/reference/exchanges.md lists the options of each.
    config.exchange_options = exchange = ConfigDict()
    # Bytes per message: size of a bucket (ddp), fusion buffer or partition. None: the default of the exchange; zero1
    # and zero2 then send 25 MiB for each 8 replicas, zero3 and hsdp a layer if more than 8 replicas share it.
    exchange.bucket_bytes = placeholder(int)
    # Dtype of gradients in transfers: float16 (gradients below 3e-8 become 0), bfloat16, float8_e4m3fn, float8_e5m2;
    # None: float32.
    exchange.wire_dtype = placeholder(str)
    exchange.algorithm = placeholder(str)  # all-reduce algorithm: psum (XLA's), ring (implemented with ppermute)
    exchange.group = placeholder(int)  # replicas per node: average within nodes, then exchange between them
    exchange.predivide = placeholder(float)  # divide gradients by this before the sum, by replicas / predivide after it
    exchange.backward_passes_per_step = placeholder(int)  # training steps per optimizer step, as in Horovod
    exchange.average_aggregated_gradients = placeholder(bool)  # True: mean of the gradients of these steps; False: sum
    exchange.block = placeholder(int)  # elements per scale (1-bit) or per range (8-bit); 0: one per encoded vector
    exchange.min_compress_bytes = placeholder(int)  # byteps_*: arrays of fewer bytes are sent uncompressed
    exchange.ratio = placeholder(float)  # fraction of the elements that topk and randomk send
    exchange.levels = placeholder(int)  # quantization levels of dithering, on each side of zero
    exchange.seed = placeholder(int)  # seed of random compressors; None: config.seed
    exchange.momentum = placeholder(float)  # Nesterov momentum applied before compression
    exchange.warmup = placeholder(float)  # bagua_qadam, onebit_adam, powersgd: fraction of steps before compression
    exchange.rank = placeholder(int)  # powersgd: rank of the matrices that approximate the gradients
    exchange.interval = placeholder(int)  # bagua_model_average, bagua_decentralized: steps between averages of weights
    exchange.peers = placeholder(
        str
    )  # bagua_decentralized: average with one peer (shift_one) or with all replicas (all)
    exchange.offload = placeholder(bool)  # ZeRO, hsdp: keep the optimizer state in host memory
    exchange.quantized_weights = placeholder(bool)  # zero3, hsdp: gather parameters with 8 bits per element
    exchange.quantized_gradients = placeholder(bool)  # zero3, hsdp: scatter gradients with 8 bits per element

    # Strategy async_data_parallel: workers compute gradients from weights that may be stale.
    # None: the default, which the comment gives.
    config.asynchronous = asynchronous = ConfigDict()
    # emulated: deterministic, in virtual time from a table of updates; live: in real threads (policies async and ssp)
    asynchronous.mode = "emulated"
    asynchronous.table = ""  # path of updates.csv of a live run that is to be repeated exactly
    asynchronous.policy = "async"  # sync, async, ssp, softsync, local_sgd, diloco, model_average
    asynchronous.num_workers = 4  # number of workers, which share the batch; can differ from the number of devices
    asynchronous.bound = placeholder(int)  # ssp: largest lead over the slowest worker, in iterations; default 3
    asynchronous.groups = placeholder(int)  # softsync: one update per num_workers / groups gradients; default 2
    # local_sgd, diloco, model_average: local steps per round; default 8, diloco: num_steps / 100, but 8 to 500
    asynchronous.interval = placeholder(int)
    asynchronous.outer_lr = placeholder(float)  # diloco: learning rate of the outer optimizer; default 0.7
    asynchronous.outer_momentum = placeholder(float)  # diloco: Nesterov momentum of the outer optimizer; default 0.9
    # Mitigations for stale gradients, comma-separated: dc_asgd or adaptive_dc_asgd, clip_by_staleness, staleness_aware,
    # corrected_momentum; empty: none. None: staleness_aware with policies async and ssp, otherwise none
    asynchronous.mitigations = placeholder(str)
    asynchronous.dc_strength = placeholder(float)  # lambda of dc_asgd (default 0.04), adaptive_dc_asgd (default 2)
    asynchronous.max_norm = placeholder(float)  # clip_by_staleness: clip to max_norm / max(staleness, 1); required
    asynchronous.delays = delays = ConfigDict()  # durations in virtual seconds, for emulated runs
    delays.distribution = "constant"  # of the time to compute a gradient: constant, uniform, lognormal, pareto, trace
    delays.compute_time = 1.0  # mean time to compute a gradient
    # uniform: times are compute_time x (1 +- spread); lognormal: sigma of the logarithm; pareto: the shape, more than 1
    delays.spread = 0.0
    delays.slowdown = 1.0  # factor on the compute times of the last worker; also applies to live runs
    delays.communication_time = 0.0  # time of one message: weights to a worker, or a gradient from it
    delays.jitter = 0.0  # messages take communication_time x (1 + jitter x e), e exponential with mean 1
    delays.trace = ""  # distribution trace: path of a CSV file of measured times with columns worker,seconds

    config.pipeline = pipeline = ConfigDict()  # strategy pipeline: schedule, microbatches, stages, memory
    # model_parallel, gpipe, 1f1b, eager_1f1b, interleaved_1f1b, zb_h1, zb_h2, zb_v, or the path of a CSV table; without
    # flush: pipedream, pipedream_vertical_sync, pipedream_2bw; for comparison: pipedream_without_stashing; auto: the
    # fastest one with a flush and one stage per device that fits the memory, by the FLOPs or the profile of the stages
    pipeline.schedule = "auto"
    # Microbatches per replica and step. 0: 4 x mesh.stage (model_parallel: 1; without flush: the fewest possible)
    pipeline.num_microbatches = 0
    # Devices of each stage, such as 2,1,1 with mesh.stage=4: the replicas of a stage take turns with the microbatches.
    # Empty: one device each. Only auto, gpipe, 1f1b and the schedules without flush support it
    pipeline.replicas = ""
    pipeline.num_chunks = 0  # stages per device; 0: the smallest number that the schedule supports
    # How layers are divided into stages: balanced by flops, parameters or number of layers (uniform), by flops but only
    # where the activations are smallest (narrow), the names of the layers that begin stages 1, 2, ...: block_2,head, or
    # auto: stages and replicas by a profile
    pipeline.partition = "flops"
    # For partition auto: profile of the layers, by `jaxpar partition profile`. Empty: measured at the start of the run
    pipeline.profile = ""
    pipeline.bandwidth = 0.0  # for partition auto: bytes per second between two devices; required
    # For partition auto and schedule auto: bytes of a device. 0: no limit; for schedule auto: the memory of the device
    pipeline.memory_limit = 0.0
    # Activations stored for the backward pass. none: all (no recomputation); full: only stage inputs; dots: the results
    # of matrix products
    pipeline.remat = "none"
    # How the devices follow the schedule. lockstep: one program, in which all wait for each other after each clock;
    # dispatch: a program for each stage and phase, which runs as soon as its inputs have arrived; auto: the faster one
    pipeline.executor = "auto"
    pipeline.trace = 0  # measure the actions of this step (from 1) and plot them in workdir/timeline.png; 0: none

    # Strategy swarm: a pipeline whose stages have several peers, which can be slow, differ, fail and join again.
    config.swarm = swarm = ConfigDict()
    # emulated: the devices of this machine repeat a run that is simulated in virtual time; live: peers are processes on
    # Ray, on this machine or others
    swarm.mode = "emulated"
    swarm.stages = 2  # number of stages, which config.pipeline.partition divides the layers into
    swarm.peers = "4"  # number of equal peers, named p0, p1, ...; or the path of a CSV file (docs/howto/swarm.md)
    swarm.trace = ""  # path of a CSV file of the times at which peers join and leave; empty: see failures
    # Without a trace: random failures. Times are exponentially distributed, in virtual seconds.
    swarm.failures = failures = ConfigDict()
    failures.lifetime = 0.0  # mean time that a peer stays; 0: peers do not fail one by one
    failures.rejoin = 60.0  # mean time until a peer that left joins again
    failures.groups = 1  # groups of peers that are preempted together; peer n is in group n modulo groups
    failures.group_lifetime = 0.0  # mean time between the preemptions of a group; 0: there are none
    failures.group_share = 0.5  # fraction of the present peers of its group that a preemption stops
    swarm.num_microbatches = 0  # microbatches of a step; 0: 4 to 8 per stage, so that they divide batch_size
    # Mean time of a forward pass of a microbatch through a stage, on a peer of speed 1. A backward pass, which also
    # repeats the forward pass, takes three times as long.
    swarm.forward_seconds = 0.1
    swarm.rebalance_seconds = 0.0  # period after which peers can move to another stage; 0: never
    swarm.rule = "balance"  # who moves: paper, balance (docs/explanation/swarm.md)
    swarm.delayed = False  # begin a step before the update of the previous one, with weights that are one step older
    swarm.compress = "none"  # activations and their gradients between peers. int8: 8 bits per element; none: exact
    # Only for mode live, where swarm.peers is the most peers at a time.
    swarm.address = ""  # HOST:PORT of a Ray cluster; auto: the one of this machine; empty: start one on this machine
    swarm.namespace = ""  # peers stay under this name if the trainer ends, for a resumed run; empty: they end with it
    swarm.peer_cpus = 1.0  # CPUs of its machine that a peer takes
    swarm.peer_gpus = 0.0  # GPUs of its machine that a peer takes; 0: it computes on CPUs
    swarm.join_seconds = 10.0  # period after which peers start on machines that joined, or replace others; 0: never
    swarm.patience = 20.0  # a peer is silent after 2 s and this many times the time of comparable calls

    config.model = model = ConfigDict()  # the model, its sizes, and how it is computed
    model.name = "bert"  # bert, gpt, resnet, vit, mlp, or the dotted name of your own module: my_package.my_model
    # bert: tiny, mini, small, base, large; gpt: tiny, gpt2, gpt2_medium, gpt2_large, gpt2_xl, llama_1b, llama_8b;
    # resnet: 18, 50; vit: tiny, small, base, large; mlp: tiny
    model.size = "tiny"
    # Hugging Face directory with pretrained weights, which also sets the sizes (docs/howto/pretrained.md)
    model.init_from = ""
    # Overrides of model.size. None: the value of the size.
    model.num_layers = placeholder(int)  # number of blocks
    model.hidden_size = placeholder(int)  # features of the hidden states; resnet: channels of the first stage
    model.num_heads = placeholder(int)  # attention heads; must divide hidden_size
    model.num_kv_heads = placeholder(int)  # gpt: key and value heads; fewer than num_heads: grouped-query attention
    model.mlp_size = placeholder(int)  # features inside the MLP; default 4 x hidden_size (swiglu: 8/3 x)
    model.vocab_size = placeholder(int)  # rows of the token embedding; None: number of tokens of the tokenizer
    model.max_length = placeholder(int)  # number of learned positions; None: data.max_length
    model.dropout = placeholder(float)  # dropout rate, from 0 to less than 1
    model.norm = placeholder(str)  # gpt: layernorm, rmsnorm
    model.activation = placeholder(str)  # gelu, gelu_tanh, relu; gpt also swiglu
    model.positions = placeholder(str)  # gpt: learned, rotary
    model.head_dim = placeholder(int)  # gpt: features of an attention head; None: hidden_size / num_heads
    model.norm_eps = placeholder(float)  # gpt: added to the variance in norms; default 1e-5
    model.qkv_bias = placeholder(bool)  # gpt with norm rmsnorm: biases of queries, keys and values; default False
    model.rope_base = placeholder(float)  # gpt with positions rotary: base of the frequencies; default 10000
    # gpt with positions rotary: scaling of the frequencies, in JSON as in config.json of Hugging Face; None: no scaling
    # {"rope_type": "linear", "factor": 2.0}, or rope_type llama3 with its four numbers (docs/howto/pretrained.md)
    model.rope_scaling = placeholder(str)
    model.tied_embeddings = placeholder(bool)  # gpt for causal_lm: the head is the embedding; default True
    model.pooling = placeholder(str)  # bert (classification and regression), vit: cls, mean
    model.patch_size = placeholder(int)  # vit: height and width of a patch, in pixels
    # bert, gpt, vit, mlp: number of times that each block is applied, one after another, with the same parameters
    model.num_applications = placeholder(int)  # default 1
    # bert, gpt, vit, mlp: blocks before which the hidden states pass a bottleneck, such as block_2,block_4. The layers
    # compress_2 and expand_2 are then before block_2; a pipeline that is cut between them sends fewer features
    model.bottlenecks = placeholder(str)  # None: no bottlenecks
    model.bottleneck = placeholder(str)  # linear (default), maxout: how the features are compressed
    model.bottleneck_factor = placeholder(int)  # features / features that are sent; default 2
    # How the model is computed. These keys do not change the parameters.
    # Dtype of the computation: float32, bfloat16, float16 (the loss is then scaled); parameters are always float32.
    model.dtype = "float32"
    # Activations stored for the backward pass of a layer. none: all; full: only layer inputs; dots: the results of
    # matrix products
    model.remat = "none"
    # Compute consecutive equal layers with one scan: True, False. auto: False if remat is none, because layers are
    # faster without a scan; otherwise True, because without one XLA on GPUs undoes rematerialization
    model.scan_layers = FieldReference("auto", field_type=bool | str)
    # Whether the backward pass of an MLP in a transformer computes its activations again: without remat, a GPT-2
    # needs 13 to 22% less memory and 1 to 9% more time on 8 H100s. auto: True on GPUs, except with the activation gelu,
    # False on CPUs
    model.recompute_activations = FieldReference("auto", field_type=bool | str)
    # Linear maps of transformers multiply one matrix [examples x positions, features]: True, or an array [examples,
    # positions, features]: False. auto: True on CPUs, where the matrix is faster, otherwise False
    model.flatten_positions = FieldReference("auto", field_type=bool | str)
    # Attention kernel. xla: JAX's own; batched: products of contiguous matrices; cudnn: for 16 bits on GPUs.
    # auto: batched on CPUs, cudnn where it is supported, otherwise xla
    model.attention = "auto"

    config.data = data = ConfigDict()  # files, splits, columns, tokenizer, loading
    data.source = "wordnet"  # wordnet, csv, tsv, jsonl, parquet, text, mnist, cifar10, synthetic
    data.train = ""  # path or glob of the training data; mnist, cifar10: a directory; wordnet, synthetic: empty
    # Path or glob of the validation and test data. Empty: a part of the training data, chosen by a hash of the example
    # (source text: the end of the text). mnist and cifar10: both empty; the test data is that of their test files.
    data.validation = ""
    data.test = ""  # as data.validation, for the test data
    data.validation_fraction = 0.05  # fraction of the training data if data.validation is empty
    data.test_fraction = 0.1  # fraction of the training data if data.test is empty
    # One text column, or two for sentence pairs; token_classification: the column with the lists of words
    data.text_columns = ("text",)
    data.label_column = "label"  # classification: column of the class; token_classification: column of the tags
    data.target_columns = ("target",)  # regression: one or more numeric columns
    # classification: weights of the classes in the training loss. Empty: 1; balanced: inversely proportional to the
    # number of training examples; JSON by class: {"spam": 5, "ham": 1}, and 1 for classes that it lacks
    data.class_weights = ""
    data.drop_unlabelled = False  # rows without a label or a target. False: end with an error; True: drop them
    # tokenizer.json or vocab.txt; empty: the tokenizer in model.init_from, otherwise trained on the training split
    data.tokenizer = ""
    data.vocab_size = 8192  # maximum vocabulary size of a tokenizer that the run trains
    data.max_length = 64  # tokens per example; longer texts are truncated; causal_lm: the block length
    # Lengths to which batches are padded: the smallest that holds all texts of the batch
    data.length_buckets = (16, 32, 64, 128, 256, 512)
    data.mask_fraction = 0.15  # masked_lm: fraction of the tokens to predict; the default is BERT's
    data.augment = False  # images: random shifts of up to 4 pixels, and random flips except for mnist
    data.synthetic_examples = 4096  # source synthetic: number of examples in all splits
    data.num_threads = 1  # background threads that prepare batches; 0: prepare them in the main thread
    data.prefetch = 8  # number of batches prepared ahead

    config.batch_size = 256  # global batch size, over all devices and accumulation steps
    config.num_epochs = 1.0  # length of the training in epochs, if num_steps is 0
    config.num_steps = 0  # length of the training in steps; 0: use num_epochs

    config.optimizer = optimizer = ConfigDict()  # optimizer, learning rate, accumulation
    optimizer.name = "adamw"  # adamw, lamb, sgd, adafactor, lion, muon
    optimizer.lr = 1e-3  # peak learning rate
    # Learning rate after the warm-up: constant, or cosine or linear decay to final_lr. It follows the steps of the run,
    # whatever number of updates they made
    optimizer.schedule = "cosine"
    optimizer.warmup = 0.1  # length of the linear warm-up, as a fraction of the steps
    optimizer.final_lr = 0.0  # final learning rate, as a fraction of lr
    optimizer.weight_decay = 0.01  # applied to matrices only, not to biases and norms
    optimizer.momentum = 0.9  # momentum of sgd and muon
    optimizer.b1 = 0.9  # decay rate of the first moment: adamw, lamb, lion, and adamw inside muon
    optimizer.b2 = 0.999  # decay rate of the second moment: adamw, lamb, lion, and adamw inside muon
    optimizer.eps = 1e-8  # added to the denominator: adamw, lamb, and adamw inside muon
    # Clip gradients to this global norm; 0: no clipping. BytePS's compressors clip those of each replica.
    optimizer.clip_norm = 1.0
    optimizer.accumulation_steps = 1  # number of microbatches per step, whose gradients are accumulated
    # If the loss or a gradient is not finite: stop the run, or skip the step. Parameters, or with stop a loss of the
    # last evaluation, that are not finite are an error
    optimizer.nonfinite = "stop"
    optimizer.max_skipped_steps = 20  # nonfinite skip: maximum number of steps skipped in a row; more stop the run

    config.eval = ConfigDict()  # evaluations during the training
    config.eval.every_steps = 0  # steps between evaluations on the validation split; 0: at the end of every epoch
    # Global batch size of evaluations; 0: batch_size. In a pipeline, each replica divides its n examples into
    # gcd(n, number of microbatches) microbatches
    config.eval.batch_size = 0

    config.early_stop = ConfigDict()  # end the run if the validation loss no longer improves
    # Stop after this many evaluations in a row without a lower validation loss; 0: never. The best checkpoint is kept
    config.early_stop.patience = 0
    config.early_stop.min_delta = 0.0  # smaller decreases of the validation loss do not count

    config.checkpoint = checkpoint = ConfigDict()  # which checkpoints are saved and kept
    checkpoint.every_steps = 500  # steps between checkpoints; 0: only at the end and on a signal
    # True: write while the next steps compute; False: steps wait for the write, so a crash loses at most every_steps
    # steps
    checkpoint.asynchronous = True
    checkpoint.keep = 2  # number of latest checkpoints to keep
    checkpoint.keep_best = True  # also keep the checkpoint with the lowest validation loss

    config.log = log = ConfigDict()  # log lines, TensorBoard, curves
    log.every_steps = 20  # steps between log lines
    log.tensorboard = True  # write TensorBoard event files
    log.curves = True  # plot curves.png and confusion.png at the end
    log.report = True  # write report.html at the end: results, curves, times, memory and config in one page
    log.peak_flops = 0.0  # peak FLOP/s of one device, for MFU; 0: from the table in jaxpar/measure/flops.py

    # A process that makes no progress for this many seconds prints where it hangs and exits; 0: no watchdog. The value
    # must be longer than any compilation, step or checkpoint write. It should be less than 1200: after that time, orbax
    # raises its own error, with fewer details, if a process hangs in a checkpoint write. The watchdog does not cover
    # the loading of the data at the start.
    config.watchdog_seconds = 900.0

    # Data-parallel runs of several processes: seconds without a heartbeat after which a process is lost, and the others
    # do its step again without it (docs/howto/elastic.md); 0: a lost process ends the run
    config.elastic_seconds = 0

    # Compare every N-th step with the same step on one device, and stop with an error if they differ by more than
    # rounding (docs/howto/certify.md); 0: none
    config.certify_every = 0

    # Several runs that train one model together, each with its own share of the data, on its own machine and with any
    # synchronous strategy. All average their parameters every few steps (docs/howto/diloco.md)
    config.outer = outer = ConfigDict()
    outer.num_workers = 0  # number of runs; 0: this run trains alone
    outer.worker = 0  # place of this run, from 0; worker 0 has the server
    outer.min_workers = 0  # number of workers for which the first round waits; 0: all
    outer.every_steps = 100  # steps of a worker between two averages of the same parameters
    # diloco: the mean difference is the gradient of an outer optimizer; local_sgd: the mean of the parameters
    outer.policy = "diloco"
    outer.lr = 0.7  # diloco: learning rate of the outer optimizer
    outer.momentum = 0.9  # diloco: its Nesterov momentum
    outer.compression = "none"  # of the differences that workers send: none, int8, topk, the last two with a residual
    outer.ratio = 0.01  # topk: fraction of the elements that are sent
    outer.fragments = 1  # number of parts of the model, which are averaged in turn; must divide every_steps
    outer.overlap_steps = 0  # steps that a worker takes while its message is in flight; 0: it waits
    outer.mix = 0.5  # with overlap_steps: share of the local parameters when the average arrives
    outer.address = ""  # HOST:PORT of a Ray cluster, or auto for the one of this machine; required
    outer.name = "outer"  # of the run on the Ray cluster: another run needs another name
    outer.silence_seconds = 30.0  # seconds without a heartbeat after which the others no longer wait for a worker

    config.profile = (0, 0)  # (first, last) step to profile, into workdir/profile; (0, 0): none
    config.cache_dir = ""  # cache of token arrays and compiled programs; empty: $JAXPAR_CACHE, or ~/.cache/jaxpar
    return config
