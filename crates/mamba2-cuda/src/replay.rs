//! The launches of a call as one CUDA graph, whose parameters are set anew for every call: three launches in a row take the host three times as
//! long (benches/NOTES.md, sixth set).
//!
//! A graph never runs twice at once, so that calls of one plan on two streams would wait for each other. A call therefore takes the graph only
//! if the call before it came on the same stream, where it would have waited anyway. All others, and those that a caller captures, are
//! launched kernel by kernel.

use std::ffi::c_void;
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUDA_KERNEL_NODE_PARAMS, CUgraphNode};

use crate::driver::check;
use crate::module::Module;
use crate::stream::{Graph, RawGraph, Stream};
use crate::{CudaError, Device};

/// A plan's graph, if it has one.
pub(crate) struct Replay {
    // None where the driver would not make or launch it.
    ready: Mutex<Option<Ready>>,
}

struct Ready {
    executable: Graph,
    /// Of each launch, in order.
    nodes: Box<[Node]>,
    /// Owns the nodes.
    _graph: RawGraph,
    /// Handle of the stream of the last call.
    stream: Option<usize>,
}

struct Node {
    handle: CUgraphNode,
    launch: CUDA_KERNEL_NODE_PARAMS,
}

// SAFETY: handles of a graph and its nodes may be used from any thread, one at a time, which the lock sees to. The pointers to parameters are
// null between calls.
unsafe impl Send for Ready {}

impl std::fmt::Debug for Replay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Replay({})", self.is_there())
    }
}

impl Replay {
    /// No graph: every call is launched kernel by kernel.
    pub fn none() -> Replay {
        Replay {
            ready: Mutex::new(None),
        }
    }

    /// The graph of what `enqueue` launches: the kernels of `modules`, each once. Runs nothing, and is [`Replay::none`] if the driver refuses.
    pub fn of(
        device: &Device,
        modules: &[&Module],
        enqueue: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Replay {
        Replay {
            ready: Mutex::new(Ready::of(device, modules, enqueue).ok().flatten()),
        }
    }

    /// True if calls may be launched as a graph.
    pub fn is_there(&self) -> bool {
        self.ready.lock().is_ok_and(|r| r.is_some())
    }

    /// Enqueues a call on `stream` as a graph, if it may be: `set` gives each launch its parameters, in order. False if nothing was enqueued. The
    /// device's context must be current.
    pub fn enqueue(
        &self,
        stream: &Stream,
        set: impl FnOnce(&mut Parameters<'_>) -> Result<(), CudaError>,
    ) -> bool {
        // Who finds another call at work does not wait for it.
        let Ok(mut place) = self.ready.try_lock() else {
            return false;
        };
        let Some(ready) = place.as_mut() else {
            return false;
        };
        let handle = stream.raw() as usize;
        let follows = ready.stream.replace(handle) == Some(handle) && !stream.is_capturing();
        if !follows {
            return false;
        }
        let mut parameters = Parameters {
            executable: &ready.executable,
            nodes: ready.nodes.iter_mut(),
        };
        let set = set(&mut parameters);
        // What was not set is an earlier call's.
        let all = parameters.nodes.len() == 0;
        let done = set.is_ok() && all && ready.executable.launch_bound(stream).is_ok();
        if !done {
            *place = None; // for good: what fails once costs every call
        }
        done
    }
}

/// Places for the parameters of a call.
pub(crate) struct Parameters<'a> {
    executable: &'a Graph,
    nodes: std::slice::IterMut<'a, Node>,
}

impl Parameters<'_> {
    /// Sets those of the next launch.
    ///
    /// # Safety
    /// As [`Module::launch`].
    pub unsafe fn set<A, B>(&mut self, args: &A, more: Option<&B>) -> Result<(), CudaError> {
        let node = self.nodes.next().ok_or(CudaError::View {
            available: 0,
            needed: 1,
        })?;
        let mut parameters = Module::parameters(args, more);
        node.launch.kernelParams = parameters.as_mut_ptr();
        // SAFETY: the node is one of this graph, whose kernel takes these parameters, by whoever calls; the driver copies them.
        let set = check("cuGraphExecKernelNodeSetParams", unsafe {
            sys::cuGraphExecKernelNodeSetParams_v2(self.executable.raw(), node.handle, &node.launch)
        });
        node.launch.kernelParams = std::ptr::null_mut();
        set
    }
}

impl Ready {
    fn of(
        device: &Device,
        modules: &[&Module],
        enqueue: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Option<Ready>, CudaError> {
        let _bound = device.bind()?;
        let graph = device.stream()?.record_graph(enqueue)?;
        let mut count = 0;
        // SAFETY: no array: the driver sets the number of nodes.
        check("cuGraphGetNodes", unsafe {
            sys::cuGraphGetNodes(graph.raw(), std::ptr::null_mut(), &mut count)
        })?;
        if count != modules.len() || modules.is_empty() {
            return Ok(None);
        }
        let mut handles = vec![std::ptr::null_mut(); count];
        // SAFETY: the pointers are to an array of `count` handles and to its length.
        check("cuGraphGetNodes", unsafe {
            sys::cuGraphGetNodes(graph.raw(), handles.as_mut_ptr(), &mut count)
        })?;
        let captured = handles
            .into_iter()
            .map(Node::of)
            .collect::<Result<Vec<_>, CudaError>>()?;
        // The driver does not say in which order nodes come; kernels of a call differ.
        let in_order = modules.iter().map(|module| {
            let mut found = captured
                .iter()
                .filter(|n| n.launch.func == module.function());
            match (found.next(), found.next()) {
                (Some(node), None) => Some(Node { ..*node }),
                _ => None,
            }
        });
        let Some(nodes) = in_order.collect::<Option<Box<[Node]>>>() else {
            return Ok(None);
        };
        Ok(Some(Ready {
            executable: graph.instantiate()?,
            nodes,
            _graph: graph,
            stream: None,
        }))
    }
}

impl Node {
    fn of(handle: CUgraphNode) -> Result<Node, CudaError> {
        let mut launch = CUDA_KERNEL_NODE_PARAMS {
            func: std::ptr::null_mut(),
            gridDimX: 0,
            gridDimY: 0,
            gridDimZ: 0,
            blockDimX: 0,
            blockDimY: 0,
            blockDimZ: 0,
            sharedMemBytes: 0,
            kernelParams: std::ptr::null_mut(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        // SAFETY: a node of a live graph, and a pointer to a live struct; of a node that is no kernel the driver makes an error.
        check("cuGraphKernelNodeGetParams", unsafe {
            sys::cuGraphKernelNodeGetParams_v2(handle, &mut launch)
        })?;
        launch.kernelParams = std::ptr::null_mut::<*mut c_void>();
        launch.extra = std::ptr::null_mut();
        Ok(Node { handle, launch })
    }
}
