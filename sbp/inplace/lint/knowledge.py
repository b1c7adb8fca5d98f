"""What the lint knows of torch, OneFlow and Python without importing them: which names make distributed tensors,
what functions return, which results share memory with their input."""

from __future__ import annotations

from functools import lru_cache

from sbp.inplace import table


def words(text: str) -> frozenset[str]:
    """The words of a text as a set: long lists of names read better so."""
    return frozenset(text.split())


# Functions and methods whose result is a distributed tensor whatever they are called on. The names are the
# frameworks' own: they are taken as such wherever they were imported from, since projects re-export them.
TENSOR_SOURCES = frozenset({"distribute_tensor"})
CLASS_SOURCES = frozenset({"DTensor"})
METHOD_SOURCES = frozenset(
    {"redistribute", "to_global", "to_consistent", "local_to_global", "global_to_global"}
)
# Methods that only a distributed tensor has; what they return shares its memory (to_local) or not.
LOCAL_METHODS = frozenset({"to_local"})
LOCAL_ATTRIBUTES = frozenset({"_local_tensor"})
FULL_METHODS = frozenset({"full_tensor"})
# Functions after which the parameters of their first argument are distributed tensors.
MODULE_SOURCES = frozenset({"distribute_module", "parallelize_module", "fully_shard"})
# torch.distributed.tensor.zeros(...) and its like.
FACTORY_MODULES = (
    "torch.distributed.tensor.",
    "torch.distributed._tensor.",
    "torch.distributed.tensor._api.",
)
FACTORIES = frozenset({"zeros", "ones", "empty", "full", "rand", "randn"})

SOURCE_WORDS = (
    TENSOR_SOURCES
    | CLASS_SOURCES
    | METHOD_SOURCES
    | LOCAL_METHODS
    | LOCAL_ATTRIBUTES
    | FULL_METHODS
    | MODULE_SOURCES
    | {"placement"}
)

# Methods whose names other types have too: alone they do not show that something is a tensor.
SHARED_METHODS = words(
    """add all any apply argmax argmin argsort astype bool clip conj copy count_nonzero cumprod cumsum data_ptr
    diagonal dot double dump fill flatten float format get half index indices int is_set_to item join long max mean
    min name new nonzero numpy pop prod put ravel repeat reshape resize round set sort split squeeze std storage
    sub sum swapaxes take tolist trace transpose type update values var view where to cpu cuda hash t map to_dense
    lower upper strip replace index_select select size dim stride unique norm log exp sqrt mul div pow"""
)

# Methods and functions that may hand back their input, or a view of it, beyond what the schemas say.
MAY_ALIAS = words(
    """float double half bfloat16 int long short byte char bool cfloat cdouble chalf type type_as to cpu cuda xpu
    ipu hpu numpy from_numpy as_tensor asarray frombuffer from_dlpack broadcast_tensors broadcast_to atleast_1d
    atleast_2d atleast_3d meshgrid requires_grad_ detach_ data to_local full_tensor redistribute to_global
    to_consistent __getitem__ as_subclass expand squeeze pin_memory dropout dropout1d dropout2d dropout3d
    alpha_dropout feature_alpha_dropout feature_dropout dequantize to_dense to_sparse coalesce unsafe_chunk
    unsafe_split unsafe_split_with_sizes pad wait_tensor sum_to_size einsum cartesian_prod conj_physical"""
)

# torch.nn modules that may hand back their input or a view of it.
ALIAS_MODULES = words(
    """Identity Flatten Unflatten Sequential ModuleList ModuleDict DataParallel Dropout Dropout1d Dropout2d Dropout3d
    AlphaDropout FeatureAlphaDropout Module PixelShuffle PixelUnshuffle ChannelShuffle Upsample UpsamplingBilinear2d
    UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d ConstantPad1d ConstantPad2d ConstantPad3d"""
)
# torch.nn modules whose result is a tuple.
TUPLE_MODULES = words("""RNN LSTM GRU RNNBase LSTMCell MultiheadAttention AdaptiveLogSoftmaxWithLoss""")
CONTAINER_MODULES = frozenset({"Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})

# Functions of torch's sub-namespaces that return tensors; others of torch (torch.cuda.*) return something else.
TENSOR_NAMESPACES = ("torch.linalg.", "torch.fft.", "torch.special.", "torch.sparse.", "torch.nested.")
MIXED_LINALG = words(
    "eig eigh svd qr slogdet lu lu_factor lstsq inv_ex cholesky_ex ldl_factor lu_factor_ex ldl_factor_ex"
)

# Calls that return their first argument, or a function that acts like it.
WRAPPERS = words(
    """torch.compile torch.jit.script torch.jit.ignore torch.jit.unused torch.jit.export torch.no_grad
    torch.enable_grad torch.inference_mode functools.wraps functools.lru_cache functools.cache functools.partial
    torch._dynamo.disable torch.compiler.disable torch.func.vmap torch.vmap torch.func.functional_call
    copy.copy copy.deepcopy typing.cast"""
)

NUMBER_BUILTINS = words(
    "len int float complex bool round id hash ord isinstance issubclass callable hasattr any all"
)
TEXT_BUILTINS = words("str repr chr format bytes input ascii hex oct bin")
BUILTINS = frozenset(
    NUMBER_BUILTINS
    | TEXT_BUILTINS
    | words(
        """abs max min sum pow divmod range enumerate zip list tuple set frozenset sorted reversed dict map filter
        iter next getattr setattr type super object print open vars dir property staticmethod classmethod slice
        locals globals"""
    )
)

SCALAR_ANNOTATIONS = frozenset({"int", "float", "complex", "bool", "Number", "Real", "Integral"})
TEXT_ANNOTATIONS = frozenset({"str", "bytes", "LiteralString"})
SEQUENCE_ANNOTATIONS = words(
    """list tuple set frozenset List Tuple Set FrozenSet Sequence MutableSequence Iterable Iterator Collection
    Generator deque"""
)
MAPPING_ANNOTATIONS = words(
    "dict Dict Mapping MutableMapping OrderedDict DefaultDict defaultdict TypedDict Unpack"
)
TENSOR_ANNOTATIONS = words(
    """Tensor FloatTensor HalfTensor BFloat16Tensor DoubleTensor LongTensor IntTensor BoolTensor ByteTensor
    ShortTensor CharTensor Parameter Buffer TensorType Float Int Bool Shaped Num Complex"""
)
OBJECT_ANNOTATIONS = frozenset(
    {"ndarray", "NDArray", "ArrayLike", "device", "dtype", "Callable", "Path", "Generator"}
)

# Method names that make a module class a root of the analysis. nn.Graph of OneFlow has build().
ENTRY_METHODS = frozenset({"forward", "build"})

# Python's in-place operator functions.
OPERATOR_FUNCTIONS = words("""iadd isub imul itruediv ifloordiv imod ipow ilshift irshift iand ior ixor""")


class Api:
    """The sections of the table that the lint asks on every call, as sets."""

    def __init__(self) -> None:
        data = table.load()
        methods = data["methods"]
        self.methods: frozenset[str] = frozenset(n for n, e in methods.items() if e["group"] != "harmless")
        self.harmless: frozenset[str] = frozenset(n for n, e in methods.items() if e["group"] == "harmless")
        self.augmented_methods: dict[str, str] = {
            entry["method"]: symbol for symbol, entry in data["augmented"].items()
        }
        self.functions: dict[str, dict[str, object]] = data["functions"]
        self.inplace_functions: dict[str, int] = data["inplace_functions"]
        self.inplace_modules: dict[str, int] = data["inplace_modules"]
        self.collectives: dict[str, list[int]] = data["collectives"]
        self.views: frozenset[str] = frozenset(data["views"]) | MAY_ALIAS
        self.modules: frozenset[str] = frozenset(data["modules"])
        returns = data["returns"]
        self.torch_returns = _by_name(returns["torch"])
        self.functional_returns = _by_name(returns["torch.nn.functional"])
        self.method_returns = _by_name(returns["method"])
        self.attribute_returns = _by_name(returns["attribute"])


def _by_name(groups: dict[str, list[str]]) -> dict[str, str]:
    return {name: kind for kind, names in groups.items() for name in names}


@lru_cache(maxsize=1)
def api() -> Api:
    """The table, read once in a process."""
    return Api()


def canonical(dotted: str) -> str:
    """One spelling for each name: OneFlow's modules become torch's."""
    if dotted.startswith("oneflow"):
        rest = dotted[len("oneflow") :]
        if not rest or rest[0] == ".":
            dotted = "torch" + rest
    return dotted


def last(dotted: str) -> str:
    """The last component of a dotted name."""
    return dotted.rpartition(".")[2]


INPLACE_NAMES = (*table.load()["inplace_functions"], *table.load()["inplace_modules"])
