//! libnvrtc, opened by hand.
//!
//! cudarc's `nvrtc::sys` opens the first of a fixed list of names that the system loader knows, panics if there is none or
//! if a function is missing, and cannot be given a path; so it can neither honour `MAMBA2_NVRTC_PATH` nor find pip's wheel.
//! This file opens one exact file with libloading and keeps the eleven functions that are needed. The opaque program
//! type is cudarc's.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::Library;

use super::search::{Candidate, builtins_beside, candidates};
use super::{NvrtcVersion, loaded_library_path};
use crate::CudaError;
use crate::environment::Environment;

const SUCCESS: c_int = 0;
const ERROR_COMPILATION: c_int = 6;

type Status = c_int;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),*) -> $ret:ty;)+) => {
        struct Functions { $($field: unsafe extern "C" fn($($arg),*) -> $ret),+ }

        impl Functions {
            fn of(library: &Library) -> Result<Functions, String> {
                // SAFETY: the signatures are those of nvrtc.h, unchanged since CUDA 11.2. Each pointer is kept no longer
                // than the library, which lives in the same struct.
                unsafe {
                    Ok(Functions { $($field: *library.get($name.as_bytes()).map_err(|e| format!("{}: {e}", $name))?),+ })
                }
            }
        }
    };
}

functions! {
    version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> Status;
    error_string = "nvrtcGetErrorString": fn(Status) -> *const c_char;
    num_supported_archs = "nvrtcGetNumSupportedArchs": fn(*mut c_int) -> Status;
    supported_archs = "nvrtcGetSupportedArchs": fn(*mut c_int) -> Status;
    create_program = "nvrtcCreateProgram": fn(*mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    destroy_program = "nvrtcDestroyProgram": fn(*mut nvrtcProgram) -> Status;
    compile_program = "nvrtcCompileProgram": fn(nvrtcProgram, c_int, *const *const c_char) -> Status;
    program_log_size = "nvrtcGetProgramLogSize": fn(nvrtcProgram, *mut usize) -> Status;
    program_log = "nvrtcGetProgramLog": fn(nvrtcProgram, *mut c_char) -> Status;
    cubin_size = "nvrtcGetCUBINSize": fn(nvrtcProgram, *mut usize) -> Status;
    cubin = "nvrtcGetCUBIN": fn(nvrtcProgram, *mut c_char) -> Status;
}

/// An open libnvrtc.
pub(super) struct NvrtcLibrary {
    functions: Functions,
    pub path: String,
    pub version: NvrtcVersion,
    pub supported: Vec<u32>,
    // Last, so that everything that points into them goes first.
    _library: Library,
    _builtins: Option<Library>,
}

/// What one run of the compiler gave.
pub(super) enum Outcome {
    Compiled { cubin: Vec<u8>, log: String },
    Refused { log: String },
}

impl NvrtcLibrary {
    pub fn open(environment: &Environment) -> Result<NvrtcLibrary, CudaError> {
        let mut tried = Vec::new();
        for candidate in candidates(environment) {
            let opened = match &candidate {
                Candidate::Name(name) => {
                    open_library(Path::new(name)).and_then(|l| NvrtcLibrary::of(l, name, None))
                }
                Candidate::File(path) => {
                    let builtins = builtins_beside(path).and_then(|b| open_library(&b).ok());
                    open_library(path)
                        .and_then(|l| NvrtcLibrary::of(l, &path.display().to_string(), builtins))
                }
                Candidate::Nothing(_) => Err("no libnvrtc.so there".into()),
            };
            match opened {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push(format!("{}: {reason}", candidate.describe())),
            }
        }
        Err(CudaError::NvrtcMissing { tried })
    }

    fn of(library: Library, name: &str, builtins: Option<Library>) -> Result<NvrtcLibrary, String> {
        let functions = Functions::of(&library)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: both pointers are to live integers.
        if unsafe { (functions.version)(&mut major, &mut minor) } != SUCCESS {
            return Err("nvrtcVersion failed".into());
        }
        // SAFETY: the pointer is to a live integer.
        if unsafe { (functions.num_supported_archs)(&mut count) } != SUCCESS {
            return Err("nvrtcGetNumSupportedArchs failed".into());
        }
        let mut archs = vec![0 as c_int; count.clamp(0, 4096) as usize];
        // SAFETY: NVRTC writes as many integers as it has just said, and the vector has that many.
        if !archs.is_empty()
            && unsafe { (functions.supported_archs)(archs.as_mut_ptr()) } != SUCCESS
        {
            return Err("nvrtcGetSupportedArchs failed".into());
        }
        // A bare name says nothing about where the library is; the process map does.
        let path = match loaded_library_path("libnvrtc.so") {
            Some(path) if !name.contains('/') => path,
            _ => PathBuf::from(name),
        };
        Ok(NvrtcLibrary {
            functions,
            path: path.display().to_string(),
            version: NvrtcVersion {
                major: major as u32,
                minor: minor as u32,
            },
            supported: archs.into_iter().map(|a| a as u32).collect(),
            _library: library,
            _builtins: builtins,
        })
    }

    fn error(&self, call: &'static str, status: Status) -> CudaError {
        // SAFETY: NVRTC returns a static string for any number.
        let text = unsafe { (self.functions.error_string)(status) };
        let text = if text.is_null() {
            format!("error {status}")
        } else {
            // SAFETY: not null, and a static NUL-terminated string by NVRTC's documentation.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        CudaError::Nvrtc {
            call,
            text,
            version: self.version.to_string(),
            path: self.path.clone(),
        }
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == SUCCESS {
            Ok(())
        } else {
            Err(self.error(call, status))
        }
    }

    /// Compiles one program. Headers are `(name of inclusion, text)`.
    pub fn compile(
        &self,
        source_name: &str,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Outcome, CudaError> {
        let text = |s: &str| {
            CString::new(s).map_err(|_| CudaError::Nvrtc {
                call: "nvrtcCreateProgram",
                text: format!("{source_name}: a NUL byte in a name, an option or a source"),
                version: self.version.to_string(),
                path: self.path.clone(),
            })
        };
        let (name, source) = (text(source_name)?, text(source)?);
        let names = headers
            .iter()
            .map(|h| text(h.0))
            .collect::<Result<Vec<_>, _>>()?;
        let bodies = headers
            .iter()
            .map(|h| text(h.1))
            .collect::<Result<Vec<_>, _>>()?;
        let options = options
            .iter()
            .map(|o| text(o))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (names, bodies, options) = (
            (pointers(&names), names),
            (pointers(&bodies), bodies),
            (pointers(&options), options),
        );

        let mut program = Program {
            library: self,
            raw: std::ptr::null_mut(),
        };
        // SAFETY: every pointer is to a NUL-terminated string that outlives the call, and the counts are their numbers.
        let status = unsafe {
            (self.functions.create_program)(
                &mut program.raw,
                source.as_ptr(),
                name.as_ptr(),
                bodies.0.len() as c_int,
                bodies.0.as_ptr(),
                names.0.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        // SAFETY: the program was just created, the options are NUL-terminated strings that outlive the call.
        let status = unsafe {
            (self.functions.compile_program)(
                program.raw,
                options.0.len() as c_int,
                options.0.as_ptr(),
            )
        };
        let log = program.text(
            "nvrtcGetProgramLog",
            self.functions.program_log_size,
            self.functions.program_log,
        )?;
        let log = String::from_utf8_lossy(&log)
            .trim_end_matches(['\0', '\n'])
            .to_string();
        match status {
            SUCCESS => {
                let cubin = program.text(
                    "nvrtcGetCUBIN",
                    self.functions.cubin_size,
                    self.functions.cubin,
                )?;
                Ok(Outcome::Compiled { cubin, log })
            }
            ERROR_COMPILATION => Ok(Outcome::Refused { log }),
            other => {
                let CudaError::Nvrtc {
                    call,
                    text,
                    version,
                    path,
                } = self.error("nvrtcCompileProgram", other)
                else {
                    return Ok(Outcome::Refused { log });
                };
                // The log says what the number does not: an unknown option by name, a builtins library not found.
                Err(CudaError::Nvrtc {
                    call,
                    text: format!("{text}\n{log}\n"),
                    version,
                    path,
                })
            }
        }
    }
}

type Sizer = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> Status;
type Getter = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> Status;

/// Destroys the program on every path.
struct Program<'a> {
    library: &'a NvrtcLibrary,
    raw: nvrtcProgram,
}

impl Program<'_> {
    fn text(&self, call: &'static str, size_of: Sizer, get: Getter) -> Result<Vec<u8>, CudaError> {
        let mut size = 0usize;
        // SAFETY: the program is live, the pointer is to a live integer.
        self.library
            .check(call, unsafe { size_of(self.raw, &mut size) })?;
        let mut bytes = vec![0u8; size];
        if size > 0 {
            // SAFETY: NVRTC writes exactly the number of bytes it has just said, and the vector has that many.
            self.library
                .check(call, unsafe { get(self.raw, bytes.as_mut_ptr().cast()) })?;
        }
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created by this library and destroyed only here.
            unsafe { (self.library.functions.destroy_program)(&mut self.raw) };
        }
    }
}

fn open_library(path: &Path) -> Result<Library, String> {
    // SAFETY: opening runs the library's initialisers. The file is NVRTC or its builtins, by name; whoever can put another
    // file there can run code in this process anyway.
    #[cfg(unix)]
    let opened = unsafe {
        // Global, so that NVRTC's own dlopen of the builtins by name finds them already loaded.
        use libloading::os::unix::{Library as UnixLibrary, RTLD_GLOBAL, RTLD_NOW};
        UnixLibrary::open(Some(path), RTLD_NOW | RTLD_GLOBAL).map(Library::from)
    };
    // SAFETY: as above.
    #[cfg(not(unix))]
    let opened = unsafe { Library::new(path) };
    opened.map_err(|e| e.to_string())
}
