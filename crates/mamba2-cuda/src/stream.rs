use std::ffi::c_void;

use cudarc::driver::sys::{self, CUevent, CUgraph, CUgraphExec, CUstream};

use crate::driver::{check, elapsed_ms};
use crate::{CudaError, Device};

/// A stream: one made here, or the caller's.
pub struct Stream {
    device: Device,
    raw: CUstream,
    owned: bool,
}

// SAFETY: stream handles may be used from any thread whose current context is theirs.
unsafe impl Send for Stream {}
// SAFETY: the driver serialises calls on one stream.
unsafe impl Sync for Stream {}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Stream({:?} on device {})",
            self.raw,
            self.device.info().ordinal
        )
    }
}

impl Device {
    /// Makes a stream that does not wait for the default stream.
    ///
    /// # Errors
    /// A driver error.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        let _bound = self.bind()?;
        let mut raw: CUstream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a live handle.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut raw, flags)
        })?;
        Ok(Stream {
            device: self.clone(),
            raw,
            owned: true,
        })
    }

    /// The default (null) stream of the device's primary context.
    pub fn default_stream(&self) -> Stream {
        Stream {
            device: self.clone(),
            raw: std::ptr::null_mut(),
            owned: false,
        }
    }

    /// The caller's own stream (`CUstream`, `cudaStream_t`); it is not destroyed.
    ///
    /// # Safety
    /// `raw` is null or a stream of this device's primary context, and stays so as long as the returned value is used.
    pub unsafe fn borrow_stream(&self, raw: *mut c_void) -> Stream {
        Stream {
            device: self.clone(),
            raw: raw.cast(),
            owned: false,
        }
    }

    /// Makes an event that can be timed.
    ///
    /// # Errors
    /// A driver error.
    pub fn event(&self) -> Result<Event, CudaError> {
        let _bound = self.bind()?;
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut raw, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
        })?;
        Ok(Event {
            device: self.clone(),
            raw,
        })
    }
}

impl Stream {
    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits for everything enqueued so far. Reports what asynchronous work did wrong.
    ///
    /// # Errors
    /// A driver error; see [`CudaError::is_fatal`].
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _bound = self.device.bind()?;
        // SAFETY: the stream is live.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.raw)
        })
    }

    /// Enqueues a mark.
    ///
    /// # Errors
    /// A driver error.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        let _bound = self.device.bind()?;
        // SAFETY: stream and event are live and of one context.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(event.raw, self.raw)
        })
    }

    /// Enqueues a wait for `event`, recorded on another stream.
    ///
    /// # Errors
    /// A driver error.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let _bound = self.device.bind()?;
        // SAFETY: stream and event are live.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(self.raw, event.raw, 0)
        })
    }

    /// True if what is enqueued is recorded for a graph of the caller's, or if the driver cannot tell because another capture is under way.
    pub(crate) fn is_capturing(&self) -> bool {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is live, the pointer is to a live status.
        let asked = unsafe { sys::cuStreamIsCapturing(self.raw, &mut status) };
        asked != sys::CUresult::CUDA_SUCCESS
            || status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Records what `enqueue` puts on this stream as a graph, without running it.
    ///
    /// # Errors
    /// Whatever `enqueue` returns, or a driver error, for instance if something in it cannot be captured.
    pub fn capture(
        &self,
        enqueue: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        self.record_graph(enqueue)?.instantiate()
    }

    /// The first half of [`Stream::capture`].
    pub(crate) fn record_graph(
        &self,
        enqueue: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<RawGraph, CudaError> {
        let _bound = self.device.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(self.raw, mode)
        })?;
        let enqueued = enqueue(self);
        let mut graph: CUgraph = std::ptr::null_mut();
        // Capture must end on every path, or the stream stays unusable.
        // SAFETY: capture began above on this thread, the pointer is to a live handle.
        let ended = check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(self.raw, &mut graph)
        });
        let graph = RawGraph {
            device: self.device.clone(),
            raw: graph,
        };
        enqueued?;
        ended?;
        Ok(graph)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_bound) = self.device.bind()
        {
            // SAFETY: made once, destroyed once; the driver lets enqueued work finish.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A captured graph.
pub(crate) struct RawGraph {
    device: Device,
    raw: CUgraph,
}

impl RawGraph {
    pub fn raw(&self) -> CUgraph {
        self.raw
    }

    pub fn instantiate(&self) -> Result<Graph, CudaError> {
        let _bound = self.device.bind()?;
        let mut executable: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the graph is live, the pointer is to a live handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut executable, self.raw, 0)
        })?;
        Ok(Graph {
            device: self.device.clone(),
            executable,
        })
    }
}

impl Drop for RawGraph {
    fn drop(&mut self) {
        if !self.raw.is_null()
            && let Ok(_bound) = self.device.bind()
        {
            // SAFETY: captured once, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.raw) };
        }
    }
}

/// An instantiated CUDA graph.
pub struct Graph {
    device: Device,
    executable: CUgraphExec,
}

// SAFETY: the handle may be used from any thread whose current context is its own, one thread at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the graph.
    ///
    /// # Errors
    /// A driver error.
    pub fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let _bound = self.device.bind()?;
        self.launch_bound(stream)
    }

    pub(crate) fn raw(&self) -> CUgraphExec {
        self.executable
    }

    /// The same with the device's context current.
    pub(crate) fn launch_bound(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: graph and stream are live. What the graph's nodes point to was vouched for when they were enqueued.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.executable, stream.raw)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: instantiated once, destroyed once; the driver lets a launched graph finish.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

/// A mark on a stream.
pub struct Event {
    device: Device,
    raw: CUevent,
}

// SAFETY: event handles may be used from any thread whose current context is theirs.
unsafe impl Send for Event {}

impl Event {
    /// Waits until the mark was reached.
    ///
    /// # Errors
    /// A driver error.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is live.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.raw)
        })
    }

    /// True if the mark was reached; does not wait.
    ///
    /// # Errors
    /// A driver error other than "not ready".
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is live.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("cuEventQuery", status).map(|()| true),
        }
    }

    /// Time from `start` to this mark, both reached. Unit: microseconds.
    ///
    /// # Errors
    /// A driver error.
    pub fn us_since(&self, start: &Event) -> Result<f64, CudaError> {
        let _bound = self.device.bind()?;
        Ok(f64::from(elapsed_ms(start.raw, self.raw)?) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
