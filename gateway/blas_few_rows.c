/* C = A x B', row-major, for an A of few rows: what a decode step and a short slice of a prompt ask for.
 *
 * OpenBLAS copies all of B into another order first. That pays when many rows use the copy; with up to some hundred it
 * takes longer than the product. Here B, which are the weights as models keep them, is read once and in the order in
 * which it lies: with it SmolLM2's decode step takes 0.7 times as long as before, on one thread of Zen 4 half as long.
 *
 * Columns are handed out in chunks to whoever is free, so that a core which somebody else uses holds nobody up. Threads
 * that help are started once and sleep between products; as many help as OpenBLAS was told to use.
 *
 * gateway/blas.py compiles this for the machine it runs on. x86-64 with FMA and a compiler that knows vectors, or
 * nothing of it is used.
 */

#if defined(__FMA__) && (defined(__clang__) || __GNUC__ >= 12)

#define HAS_FEW_ROWS 1

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#if defined(__AVX512F__)
enum { LANES = 16, TILE_ROWS = 6 }; /* sums of 6 x 4 vectors, 4 of B and 1 of A: 29 of 32 registers */
#define FIRST_OF_PAIRS 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define SECOND_OF_PAIRS 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#else
enum { LANES = 8, TILE_ROWS = 2 }; /* 2 x 4, 4 and 1: 13 of 16 */
#define FIRST_OF_PAIRS 0, 2, 8, 10, 4, 6, 12, 14
#define SECOND_OF_PAIRS 1, 3, 9, 11, 5, 7, 13, 15
#endif

enum { TILE_COLUMNS = 4, CHUNK_COLUMNS = 32, MOST_ROWS = 128, LEAST_DEPTH = 256, MOST_HELPERS = 63, SPINS = 1000 };

/* They look at arrays of floats and at one another. */
typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    int rows, columns, depth;
    const float *a, *b;
    float *c;
    int64_t a_stride, b_stride, c_stride;
} Product;

/* Whether `few_rows_multiply` takes it. */
static int few_rows_takes(int rows, int columns, int depth)
{
    return rows <= MOST_ROWS && depth >= LEAST_DEPTH && depth % LANES == 0 && columns >= CHUNK_COLUMNS &&
           columns % TILE_COLUMNS == 0;
}

/* Of pairs of neighbours in groups of four: x01 x23 y01 y23. */
static inline Vector pair_sums(Vector x, Vector y)
{
    return __builtin_shufflevector(x, y, FIRST_OF_PAIRS) + __builtin_shufflevector(x, y, SECOND_OF_PAIRS);
}

/* `rows` and `is_first` are constants where this is inlined. The first tile of a strip fetches the next strip. */
static inline __attribute__((always_inline)) void multiply_tile(const Product *p, int row, int column, const int rows,
                                                                const int is_first)
{
    const float *a = p->a + row * p->a_stride, *b = p->b + column * p->b_stride;
    Vector sums[TILE_ROWS][TILE_COLUMNS] = {0};
    for (int k = 0; k < p->depth; k += LANES) {
        Vector weights[TILE_COLUMNS];
        for (int j = 0; j < TILE_COLUMNS; j++) {
            weights[j] = *(const Vector *)(b + j * p->b_stride + k);
            if (is_first)
                __builtin_prefetch(b + (j + TILE_COLUMNS) * p->b_stride + k);
        }
        for (int i = 0; i < rows; i++) {
            Vector x = *(const Vector *)(a + i * p->a_stride + k);
            __asm__("" : "+v"(x)); /* keeps it in a register: else it is loaded for each of the columns */
            for (int j = 0; j < TILE_COLUMNS; j++)
                sums[i][j] += x * weights[j];
        }
    }
    for (int i = 0; i < rows; i++) {
        Vector *s = sums[i], by_column = pair_sums(pair_sums(s[0], s[1]), pair_sums(s[2], s[3]));
        Four *parts = (Four *)&by_column, whole = parts[0];
        for (int part = 1; part < LANES / 4; part++)
            whole += parts[part];
        *(Four *)(p->c + (row + i) * p->c_stride + column) = whole;
    }
}

static void multiply_strip(const Product *p, int column)
{
    int row = 0;
    if (p->rows >= TILE_ROWS) {
        multiply_tile(p, row, column, TILE_ROWS, 1);
        for (row = TILE_ROWS; row + TILE_ROWS <= p->rows; row += TILE_ROWS)
            multiply_tile(p, row, column, TILE_ROWS, 0);
    }
    switch (p->rows - row) { /* fewer than a tile: the remainders only make impossible cases small */
    case 5: multiply_tile(p, row, column, 5 % TILE_ROWS, row == 0); break;
    case 4: multiply_tile(p, row, column, 4 % TILE_ROWS, row == 0); break;
    case 3: multiply_tile(p, row, column, 3 % TILE_ROWS, row == 0); break;
    case 2: multiply_tile(p, row, column, 2 % TILE_ROWS, row == 0); break;
    case 1: multiply_tile(p, row, column, 1, row == 0); break;
    }
}

/* One product at a time is shared. `round` is odd while it may be joined, and `inside` counts who has joined. */
static struct {
    Product product;
    atomic_int next_column, seats, inside;
    atomic_uint round;
} shared;

static pthread_mutex_t sharing = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static int sleepers, helpers;

static void multiply_chunks(void)
{
    const Product *p = &shared.product;
    int begin;
    while ((begin = atomic_fetch_add(&shared.next_column, CHUNK_COLUMNS)) < p->columns) {
        int end = begin + CHUNK_COLUMNS < p->columns ? begin + CHUNK_COLUMNS : p->columns;
        for (int column = begin; column < end; column += TILE_COLUMNS)
            multiply_strip(p, column);
    }
}

static void *help(void *nothing)
{
    unsigned seen = 0, round;
    for (;;) {
        for (int spins = 0; (round = atomic_load(&shared.round)) == seen; spins++) {
            __builtin_ia32_pause();
            if (spins < SPINS)
                continue;
            pthread_mutex_lock(&sleeping);
            sleepers++;
            while (atomic_load(&shared.round) == seen)
                pthread_cond_wait(&opened, &sleeping);
            sleepers--;
            pthread_mutex_unlock(&sleeping);
        }
        seen = round;
        if (round % 2 == 0)
            continue;
        atomic_fetch_add(&shared.inside, 1);
        /* Once inside, the round can end but no other begin. It may have ended before: then nothing here is valid. */
        if (atomic_load(&shared.round) == round && atomic_fetch_sub(&shared.seats, 1) > 0)
            multiply_chunks();
        atomic_fetch_sub(&shared.inside, 1);
    }
    return nothing;
}

static void start_helpers(int wanted)
{
    pthread_t thread;
    while (helpers < wanted && helpers < MOST_HELPERS && pthread_create(&thread, NULL, help, NULL) == 0) {
        pthread_detach(thread);
        helpers++;
    }
}

static void few_rows_multiply(Product product, int threads)
{
    if (threads < 2 || pthread_mutex_trylock(&sharing) != 0) {
        for (int column = 0; column < product.columns; column += TILE_COLUMNS)
            multiply_strip(&product, column);
        return;
    }
    start_helpers(threads - 1);
    shared.product = product;
    atomic_store(&shared.next_column, 0);
    atomic_store(&shared.seats, threads - 1);
    pthread_mutex_lock(&sleeping);
    atomic_fetch_add(&shared.round, 1);
    if (sleepers)
        pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&sleeping);
    multiply_chunks();
    atomic_fetch_add(&shared.round, 1);
    while (atomic_load(&shared.inside))
        __builtin_ia32_pause();
    pthread_mutex_unlock(&sharing);
}

#endif
