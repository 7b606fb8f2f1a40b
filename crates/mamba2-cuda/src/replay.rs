//! The launches of a call as one CUDA graph, whose parameters are set anew for every call: three launches in a row take the host three times as
//! long (benches/NOTES.md, sixth set).
//!
//! A graph never runs twice at once, so that calls of one plan on two streams would wait for each other. A call therefore takes the graph only
//! if the call before it came on the same stream, where it would have waited anyway. All others, and those that a caller captures, are
//! launched kernel by kernel.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard};

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

    /// The graph for a call on `stream`, if it may be launched there. The device's context must be current.
    pub fn begin(&self, stream: &Stream) -> Option<Turn<'_>> {
        // Who finds another call at work does not wait for it.
        let mut ready = self.ready.try_lock().ok()?;
        let before = ready.as_mut()?.stream.replace(stream.raw() as usize);
        let follows = before == Some(stream.raw() as usize) && !stream.is_capturing();
        follows.then_some(Turn { ready, next: 0 })
    }
}

/// One call's use of a graph.
pub(crate) struct Turn<'a> {
    ready: MutexGuard<'a, Option<Ready>>,
    next: usize,
}

impl Turn<'_> {
    /// Sets the parameters of the next launch.
    ///
    /// # Safety
    /// As [`Module::launch`].
    pub unsafe fn set<A, B>(&mut self, args: &A, more: Option<&B>) -> Result<(), CudaError> {
        let Some(ready) = self.ready.as_mut() else {
            return Ok(());
        };
        let node = &mut ready.nodes[self.next];
        self.next += 1;
        let mut parameters = Module::parameters(args, more);
        node.launch.kernelParams = parameters.as_mut_ptr();
        // SAFETY: the node is one of this graph, whose kernel takes these parameters, by whoever calls; the driver copies them.
        let set = check("cuGraphExecKernelNodeSetParams", unsafe {
            sys::cuGraphExecKernelNodeSetParams_v2(
                ready.executable.raw(),
                node.handle,
                &node.launch,
            )
        });
        node.launch.kernelParams = std::ptr::null_mut();
        set
    }

    /// Enqueues the call, once every launch has its parameters.
    pub fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        match self.ready.as_ref() {
            // What was not set is an earlier call's.
            Some(ready) if self.next < ready.nodes.len() => Err(CudaError::View {
                available: self.next,
                needed: ready.nodes.len(),
            }),
            Some(ready) => ready.executable.launch_bound(stream),
            None => Ok(()),
        }
    }

    /// Gives the graph up for good.
    pub fn give_up(mut self) {
        *self.ready = None;
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
