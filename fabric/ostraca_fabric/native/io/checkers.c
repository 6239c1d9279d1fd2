/* Threads that check the tags of completed reads, for a back end whose thread must not stay away from its ring. */

#include "io.h"

#include <sys/prctl.h>

static void *check_reads(void *given)
{
    struct io_engine *engine = given;
    prctl(PR_SET_NAME, "check");
    pthread_mutex_lock(&engine->checkers.lock);
    for (;;) {
        struct io *io = engine->checkers.first;
        if (!io) {
            if (engine->checkers.is_stopping)
                break;
            pthread_cond_wait(&engine->checkers.work, &engine->checkers.lock);
            continue;
        }
        engine->checkers.first = io->next;
        if (!io->next)
            engine->checkers.last = &engine->checkers.first;
        pthread_mutex_unlock(&engine->checkers.lock);
        io_check(io);
        io_finish(io, -1);
        pthread_mutex_lock(&engine->checkers.lock);
    }
    pthread_mutex_unlock(&engine->checkers.lock);
    return NULL;
}

int checkers_start(struct io_engine *engine, int count)
{
    engine->checkers.last = &engine->checkers.first;
    pthread_mutex_init(&engine->checkers.lock, NULL);
    pthread_cond_init(&engine->checkers.work, NULL);
    for (int each = 0; each < count && each < CHECKERS_MAX; each++) {
        int failed = pthread_create(&engine->checkers.threads[each], NULL, check_reads, engine);
        if (failed) {
            checkers_stop(engine);
            return failed;
        }
        engine->checkers.count++;
    }
    return 0;
}

void checkers_stop(struct io_engine *engine)
{
    if (!engine->checkers.last)
        return; /* never started */
    pthread_mutex_lock(&engine->checkers.lock);
    engine->checkers.is_stopping = 1;
    pthread_cond_broadcast(&engine->checkers.work);
    pthread_mutex_unlock(&engine->checkers.lock);
    while (engine->checkers.count)
        pthread_join(engine->checkers.threads[--engine->checkers.count], NULL);
}

void checkers_add(struct io_engine *engine, struct io *reads)
{
    if (!reads)
        return;
    pthread_mutex_lock(&engine->checkers.lock);
    for (*engine->checkers.last = reads; reads; reads = reads->next)
        engine->checkers.last = &reads->next;
    pthread_mutex_unlock(&engine->checkers.lock);
    pthread_cond_broadcast(&engine->checkers.work);
}
