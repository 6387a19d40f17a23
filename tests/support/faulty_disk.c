/* A library to be preloaded (LD_PRELOAD) into a process: counts the calls that change files below a
   folder, kills the process or its group at one of them, or lets some of them fail. faulty_disk.py
   controls it through a file that is mapped into memory, so that a fault can begin and end at any
   time, in one process or in all that have the library.

   Only calls through the C library are seen: those of Python, of Rust and of C++. A test compares
   them with what strace sees. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The same names and order as in faulty_disk.py. */
enum { CREATE = 1, WRITE = 2, SYNC = 4, RENAME = 8, MKDIR = 16, REMOVE = 32, TRUNCATE = 64, CHMOD = 128, OPEN = 256 };

struct control {
  int64_t armed;
  int64_t kill_at;    /* the call before which the process is killed; 0: none */
  int64_t torn;       /* 1: half of a write is made before the kill */
  int64_t counted;    /* calls so far; those in `counts` */
  int64_t counts;     /* which kinds are counted */
  int64_t error;      /* errno with which calls fail; 0: none */
  int64_t fails;      /* which kinds fail */
  int64_t logs;       /* 1: write each call that could be counted to the file FAULTY_DISK_LOG */
  int64_t process;    /* the one whose calls are counted and fail; 0: all; -1: none yet */
  int64_t alone;      /* 1: only this process is killed, not its group */
  char folder[PATH_MAX];
};

static struct control *control;
static int log_file = -1;

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("FAULTY_DISK_CONTROL"), *log = getenv("FAULTY_DISK_LOG");
  int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  if (mapped != MAP_FAILED) control = mapped;
  if (log) log_file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int is_inside(const char *path) {
  size_t length = strlen(control->folder);
  return length > 0 && strncmp(path, control->folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void path_of_descriptor(int descriptor, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  path[length < 0 ? 0 : length] = 0;
}

static void path_at(int folder, const char *name, char *path) {
  if (name == NULL || name[0] == '/') {
    snprintf(path, PATH_MAX, "%s", name ? name : "");
    return;
  }
  char parent[PATH_MAX] = "";
  if (folder == AT_FDCWD) {
    if (getcwd(parent, sizeof parent) == NULL) parent[0] = 0;
  } else {
    path_of_descriptor(folder, parent);
  }
  if (snprintf(path, PATH_MAX, "%s/%s", parent, name) >= PATH_MAX) path[0] = 0;
}

/* Returns 0: make the call; 1: it is the one to be killed at; -1: it fails, errno is set. */
static int arrive(int kind, const char *name, const char *path, const char *target) {
  if (control == NULL || !control->armed || !(is_inside(path) || (target && is_inside(target)))) return 0;
  int result = 0;
  long process = syscall(SYS_getpid);
  if ((control->counts & kind) && control->logs && log_file >= 0) {
    char line[2 * PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\n", process, name, path, target ? target : "");
    syscall(SYS_write, log_file, line, length);
  }
  if (control->process && control->process != process) return 0;
  if (control->counts & kind) {
    int64_t number = __atomic_add_fetch(&control->counted, 1, __ATOMIC_SEQ_CST);
    result = number == control->kill_at;
  }
  if (!result && control->error && (control->fails & kind)) {
    errno = (int)control->error;
    return -1;
  }
  return result;
}

/* Kills this process, or its group: the other processes of a run end with it. */
static void die(void) {
  syscall(SYS_kill, control->alone ? syscall(SYS_getpid) : 0, SIGKILL);
  for (;;) pause();
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define STOP_AT(kind, name, path, target) \
  switch (arrive(kind, name, path, target)) { \
    case 1: die(); /* does not return */ \
    case -1: return -1; \
  }

static int opening(int flags) { return (flags & (O_CREAT | O_TRUNC)) && !((flags & O_TMPFILE) == O_TMPFILE) ? CREATE : OPEN; }

#define DEFINE_OPEN(function) \
  int function(const char *name, int flags, ...) { \
    REAL(int, #function, const char *, int, ...); \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
    char path[PATH_MAX]; path_at(AT_FDCWD, name, path); \
    STOP_AT(opening(flags), "open", path, NULL); \
    return real(name, flags, mode); \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(function) \
  int function(int folder, const char *name, int flags, ...) { \
    REAL(int, #function, int, const char *, int, ...); \
    va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
    char path[PATH_MAX]; path_at(folder, name, path); \
    STOP_AT(opening(flags), "open", path, NULL); \
    return real(folder, name, flags, mode); \
  }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

#define DESCRIPTOR_PATH(descriptor) char path[PATH_MAX]; path_of_descriptor(descriptor, path)

ssize_t write(int descriptor, const void *buffer, size_t length) {
  REAL(ssize_t, "write", int, const void *, size_t);
  if (control == NULL || !control->armed) return real(descriptor, buffer, length);
  DESCRIPTOR_PATH(descriptor);
  switch (arrive(WRITE, "write", path, NULL)) {
    case 1:
      if (control->torn) real(descriptor, buffer, length / 2);
      die();
    case -1: return -1;
  }
  return real(descriptor, buffer, length);
}

#define DEFINE_DESCRIPTOR(type, function, kind, name, declared, passed, ...) \
  type function declared { \
    REAL(type, #function, __VA_ARGS__); \
    DESCRIPTOR_PATH(descriptor); \
    STOP_AT(kind, name, path, NULL); \
    return real passed; \
  }
DEFINE_DESCRIPTOR(ssize_t, pwrite, WRITE, "write", (int descriptor, const void *b, size_t n, off_t o), (descriptor, b, n, o), int, const void *, size_t, off_t)
DEFINE_DESCRIPTOR(ssize_t, pwrite64, WRITE, "write", (int descriptor, const void *b, size_t n, off64_t o), (descriptor, b, n, o), int, const void *, size_t, off64_t)
DEFINE_DESCRIPTOR(ssize_t, writev, WRITE, "write", (int descriptor, const struct iovec *v, int n), (descriptor, v, n), int, const struct iovec *, int)
DEFINE_DESCRIPTOR(ssize_t, sendfile, WRITE, "write", (int descriptor, int from, off_t *o, size_t n), (descriptor, from, o, n), int, int, off_t *, size_t)
DEFINE_DESCRIPTOR(ssize_t, sendfile64, WRITE, "write", (int descriptor, int from, off64_t *o, size_t n), (descriptor, from, o, n), int, int, off64_t *, size_t)
DEFINE_DESCRIPTOR(int, fsync, SYNC, "fsync", (int descriptor), (descriptor), int)
DEFINE_DESCRIPTOR(int, fdatasync, SYNC, "fsync", (int descriptor), (descriptor), int)
DEFINE_DESCRIPTOR(int, ftruncate, TRUNCATE, "truncate", (int descriptor, off_t n), (descriptor, n), int, off_t)
DEFINE_DESCRIPTOR(int, ftruncate64, TRUNCATE, "truncate", (int descriptor, off64_t n), (descriptor, n), int, off64_t)
DEFINE_DESCRIPTOR(int, posix_fallocate, TRUNCATE, "truncate", (int descriptor, off_t o, off_t n), (descriptor, o, n), int, off_t, off_t)
DEFINE_DESCRIPTOR(int, posix_fallocate64, TRUNCATE, "truncate", (int descriptor, off64_t o, off64_t n), (descriptor, o, n), int, off64_t, off64_t)
DEFINE_DESCRIPTOR(int, fchmod, CHMOD, "chmod", (int descriptor, mode_t m), (descriptor, m), int, mode_t)

ssize_t copy_file_range(int from, off64_t *o, int descriptor, off64_t *p, size_t n, unsigned flags) {
  REAL(ssize_t, "copy_file_range", int, off64_t *, int, off64_t *, size_t, unsigned);
  DESCRIPTOR_PATH(descriptor);
  STOP_AT(WRITE, "write", path, NULL);
  return real(from, o, descriptor, p, n, flags);
}

#define DEFINE_PATH(function, kind, name, declared, passed, folder, ...) \
  int function declared { \
    REAL(int, #function, __VA_ARGS__); \
    char path[PATH_MAX]; path_at(folder, p, path); \
    STOP_AT(kind, name, path, NULL); \
    return real passed; \
  }
DEFINE_PATH(mkdir, MKDIR, "mkdir", (const char *p, mode_t m), (p, m), AT_FDCWD, const char *, mode_t)
DEFINE_PATH(mkdirat, MKDIR, "mkdir", (int d, const char *p, mode_t m), (d, p, m), d, int, const char *, mode_t)
DEFINE_PATH(rmdir, REMOVE, "remove", (const char *p), (p), AT_FDCWD, const char *)
DEFINE_PATH(unlink, REMOVE, "remove", (const char *p), (p), AT_FDCWD, const char *)
DEFINE_PATH(unlinkat, REMOVE, "remove", (int d, const char *p, int f), (d, p, f), d, int, const char *, int)
DEFINE_PATH(chmod, CHMOD, "chmod", (const char *p, mode_t m), (p, m), AT_FDCWD, const char *, mode_t)
DEFINE_PATH(fchmodat, CHMOD, "chmod", (int d, const char *p, mode_t m, int f), (d, p, m, f), d, int, const char *, mode_t, int)
DEFINE_PATH(truncate, TRUNCATE, "truncate", (const char *p, off_t n), (p, n), AT_FDCWD, const char *, off_t)
DEFINE_PATH(truncate64, TRUNCATE, "truncate", (const char *p, off64_t n), (p, n), AT_FDCWD, const char *, off64_t)

#define DEFINE_RENAME(function, declared, passed, from, to, ...) \
  int function declared { \
    REAL(int, #function, __VA_ARGS__); \
    char path[PATH_MAX], target[PATH_MAX]; path_at(from, p, path); path_at(to, q, target); \
    STOP_AT(RENAME, "rename", path, target); \
    return real passed; \
  }
DEFINE_RENAME(rename, (const char *p, const char *q), (p, q), AT_FDCWD, AT_FDCWD, const char *, const char *)
DEFINE_RENAME(renameat, (int d, const char *p, int e, const char *q), (d, p, e, q), d, e, int, const char *, int, const char *)
DEFINE_RENAME(renameat2, (int d, const char *p, int e, const char *q, unsigned f), (d, p, e, q, f), d, e, int, const char *, int, const char *, unsigned)
