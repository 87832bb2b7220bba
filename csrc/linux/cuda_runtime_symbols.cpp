// Functions of libdl, libpthread and librt that the static CUDA runtime uses. glibc 2.34 moved them
// to libc, with a new version each. torch's libraries need libdl, libpthread and librt, so that
// these are loaded where they are libraries of their own. The aarch64 wheel has no CUDA kernels.
#include "linux/forward.h"

#ifdef __x86_64__
FORWARD_TO(dlmopen, "@GLIBC_2.3.4");
FORWARD(dlclose);
FORWARD(dlerror);
FORWARD(dlopen);
FORWARD(dlvsym);
FORWARD(pthread_condattr_setpshared);
FORWARD(pthread_create);
FORWARD(pthread_detach);
FORWARD(pthread_getspecific);
FORWARD(pthread_join);
FORWARD(pthread_key_create);
FORWARD(pthread_key_delete);
FORWARD(pthread_kill);
FORWARD(pthread_mutex_trylock);
FORWARD(pthread_mutexattr_destroy);
FORWARD(pthread_mutexattr_init);
FORWARD(pthread_mutexattr_setpshared);
FORWARD(pthread_mutexattr_settype);
FORWARD(pthread_once);
FORWARD(pthread_rwlock_destroy);
FORWARD(pthread_rwlock_init);
FORWARD(pthread_rwlock_rdlock);
FORWARD(pthread_rwlock_timedrdlock);
FORWARD(pthread_rwlock_timedwrlock);
FORWARD(pthread_rwlock_tryrdlock);
FORWARD(pthread_rwlock_trywrlock);
FORWARD(pthread_rwlock_unlock);
FORWARD(pthread_rwlock_wrlock);
FORWARD(pthread_rwlockattr_destroy);
FORWARD(pthread_rwlockattr_init);
FORWARD(pthread_rwlockattr_setpshared);
FORWARD(pthread_setspecific);
FORWARD(pthread_spin_destroy);
FORWARD(pthread_spin_init);
FORWARD(pthread_spin_lock);
FORWARD(pthread_spin_trylock);
FORWARD(pthread_spin_unlock);
FORWARD(sem_destroy);
FORWARD(sem_init);
FORWARD(sem_post);
FORWARD(sem_timedwait);
FORWARD(sem_trywait);
FORWARD(sem_wait);
FORWARD(shm_open);
FORWARD(shm_unlink);
#endif
