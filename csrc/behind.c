#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

#include "behind.h"

/* A thread of its own: its priority cannot be raised again, and while it waits for a processor it must not hold what
 * the others wait for, the interpreter's lock least of all. */

enum { NICE = 10 }; /* a tenth of a busy processor */

struct job {
    int descriptor;
    const uint8_t *data; /* none: sync */
    size_t len;
    int64_t offset, result;
};

static void run(struct job *job)
{
    int64_t done;
    do
        done = job->data ? pwrite(job->descriptor, job->data, job->len, (off_t)job->offset) : fsync(job->descriptor);
    while (done < 0 && errno == EINTR); /* a signal of the process may be taken in this thread */
    job->result = done < 0 ? -errno : done;
}

static void *run_behind(void *job)
{
#ifdef __linux__
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICE); /* of this thread alone */
#endif
    run(job);
    return NULL;
}

static int64_t wait_for(struct job job)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_behind, &job))
        run(&job);
    else
        pthread_join(thread, NULL);
    return job.result;
}

int64_t sf_write_behind(int descriptor, const uint8_t *data, size_t len, int64_t offset)
{
    return wait_for((struct job){descriptor, data, len, offset, 0});
}

int64_t sf_sync_behind(int descriptor)
{
    return wait_for((struct job){descriptor, NULL, 0, 0, 0});
}
