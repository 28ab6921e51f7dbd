// One row of attention, docs/algorithm.md with the recipe DEFAULT, to int8: one query against the keys and values of a head.
//
// The query stays while the row runs. Keys come first, one in a cycle in which in_ready and in_valid are set, then as many
// values; scores are kept on chip between. Then the channels of the output leave, one every four cycles. A row of N keys and
// C channels takes 2 N + 4 C + 12 cycles. A multiplier of 33 x 32 bits serves scores, reciprocal and outputs.
module attention_row #(
    parameter int CHANNELS = 64,  // of query and key, at most 512
    parameter int VALUES = 64,    // channels of a value
    parameter int KEYS = 256,     // most keys, at most 65536
    localparam int KEY_INDEX = KEYS > 1 ? $clog2(KEYS) : 1,
    localparam int INDEX = VALUES > 1 ? $clog2(VALUES) : 1
) (
    input  logic                    clk,
    input  logic                    reset,
    // of the row
    input  logic [16:0]             keys,           // N, 1 to KEYS
    input  logic                    exact,          // whether the row sum is exact: N > 64
    input  logic [30:0]             inverse_count,  // floor(2^31 / N), at most 2^31 - 1
    input  logic [30:0]             multiplier,     // M, or R with a scale a key
    input  logic [5:0]              drop,           // 0; with a bias F - F'; with a scale a key 32
    input  logic [4:0]              fraction,       // F, or F'
    input  logic                    biased,
    input  logic [8*CHANNELS-1:0]   query,
    // of a key, then of a value
    input  logic                    in_valid,
    output logic                    in_ready,
    output logic                    wants_value,    // value is taken, not key, column, shown and bias
    input  logic [8*CHANNELS-1:0]   key,
    input  logic [16:0]             column,         // A; 1 with one scale for all keys
    input  logic                    shown,          // no mask hides the key
    input  logic signed [31:0]      bias,           // in 1/65536 octaves, with the marks of the page
    input  logic [8*VALUES-1:0]     value,
    // of an output
    output logic [INDEX-1:0]        channel,        // whose ratio is wanted, until its output leaves
    input  logic [30:0]             ratio,          // R of the channel: s_V / s_O
    input  logic [4:0]              ratio_shift,    // e - 11
    output logic                    out_valid,
    output logic signed [31:0]      numerator,      // O with the missing mass
    output logic [30:0]             denominator,    // L, or l
    output logic signed [7:0]       y
);
    localparam logic signed [31:0] MASKED = -32'sd1073741824;     // of a bias: the key takes no part
    localparam logic signed [31:0] BIAS_LIMIT = 32'sd268435456;   // larger ones are marks
    localparam logic signed [31:0] NOTHING = 32'sh80000000;       // below every score

    typedef enum logic [3:0] {
        SCORE, SCORED, WEIGH, WEIGHED, ADDED, ALIGN, START, ERROR, STEP, MEAN, MISSING, RATIO, LEAVE
    } state_t;
    state_t state;

    logic [KEY_INDEX-1:0] count;
    logic [1:0] turn;
    logic last;
    assign last = 17'(count) == keys - 17'd1;
    assign in_ready = state == SCORE || state == WEIGH;
    assign wants_value = state == WEIGH;

    // a score: S, then y = S A, in a register
    logic signed [24:0] score;
    logic signed [31:0] scaled;
    always_comb begin
        score = 25'sd0;
        for (int i = 0; i < CHANNELS; i++) score = score + 25'($signed(query[8*i+:8])) * 25'($signed(key[8*i+:8]));
    end
    assign scaled = 32'(score) * $signed({15'd0, column});

    // the shared multiplier: floor((a b + half) / 2^n)
    logic signed [32:0] a;
    logic signed [31:0] b, product;
    logic [5:0] n;
    logic half;
    logic signed [64:0] wide;
    assign wide = a * b + (half ? 65'sd1 <<< (n - 6'd1) : 65'sd0);
    assign product = 32'(wide >>> n);

    // z, one cycle later, kept in order; the largest of those that take part
    logic scored, shown1;
    logic signed [31:0] scaled1, bias1, z, most;
    logic [KEY_INDEX-1:0] place1;
    logic takes_part;
    logic signed [31:0] kept[0:KEYS-1];
    logic part_of[0:KEYS-1];
    assign takes_part = shown1 && !(biased && bias1 == MASKED);
    assign z = !biased ? scaled1 : bias1 > BIAS_LIMIT ? bias1 : product + (bias1 >>> (5'd16 - fraction));

    // a weight: t in a register, then w; P is w rounded
    logic signed [32:0] below;
    logic [31:0] start, t, octaves;
    logic weighed, part1, added;
    logic [8*VALUES-1:0] value1, value2;
    logic [7:0] of_octave, P;
    logic [8:0] g;
    logic [18:0] mantissa;
    logic [14:0] w, w1;
    assign below = 33'(most) - 33'(kept[count]);
    assign start = 32'(((34'd301 << fraction) + 34'd511) >> 9);
    assign octaves = t >> fraction;
    assign of_octave = 8'(fraction < 5'd8 ? t << (5'd8 - fraction) : t >> (fraction - 5'd8));
    assign g = {1'b1, ~of_octave};
    assign mantissa = 19'(g) * 19'(g) + 19'd131072;
    assign w = !part1 || octaves > 32'd24 ? 15'd0 : 15'(mantissa >> (6'(octaves) + 6'd3));
    assign P = 8'((16'(w1) + 16'd64) >> 7);

    // sums over the keys
    logic [30:0] sum_w, rounded;
    logic [23:0] sum_P;
    logic signed [31:0] O[0:VALUES-1];
    logic signed [23:0] sum_V[0:VALUES-1];
    assign rounded = {sum_P, 7'd0};

    // normalisation
    logic [21:0] missing;
    logic [5:0] length, bits;         // of the divisor; B
    logic signed [31:0] D, x, partial;
    logic signed [31:0] aligned, by_ratio, high;
    logic signed [7:0] fitted;
    always_comb begin
        length = 6'd0;
        for (int i = 0; i < 31; i++) if (denominator[i]) length = 6'(i + 1);
    end
    assign aligned = bits <= 6'd24 ? numerator <<< (6'd24 - bits) : numerator >>> (bits - 6'd24);
    assign high = ratio_shift == 5'd0 ? product : ((product >>> (ratio_shift - 5'd1)) + 32'sd1) >>> 1;
    saturate #(.IN(32), .OUT(8)) fit (.x(high), .y(fitted));

    always_comb begin
        a = 33'(scaled1); b = {1'b0, multiplier}; n = drop; half = 1'b0;
        case (state)
            WEIGH: a = below;
            START: begin a = 33'(D); b = 32'sd2021161080; n = 6'd32; half = 1'b1; end
            ERROR: begin a = 33'(D); b = x; n = 6'd32; half = 1'b1; end
            STEP: begin a = 33'(x); b = partial; n = 6'd28; half = 1'b1; end
            MEAN: begin a = 33'($signed({sum_V[channel], 3'b000})); b = {1'b0, inverse_count}; n = 6'd33; half = 1'b1; end
            MISSING: begin a = 33'(partial); b = {10'd0, missing}; n = 6'd0; end
            RATIO: begin a = 33'(x); b = {1'b0, ratio}; n = 6'd32; half = 1'b1; end
            LEAVE: begin a = 33'(aligned); b = by_ratio; n = 6'd32; end
            default: ;
        endcase
    end

    always_ff @(posedge clk) begin
        {scored, weighed, out_valid} <= 3'd0;
        added <= weighed;

        if (scored) begin
            kept[place1] <= z;
            part_of[place1] <= takes_part;
            if (takes_part && z > most) most <= z;
        end
        w1 <= w;
        value2 <= value1;
        if (added) begin
            sum_w <= sum_w + 31'(w1);
            sum_P <= sum_P + 24'(P);
            for (int i = 0; i < VALUES; i++) begin
                O[i] <= O[i] + 32'($signed({1'b0, P})) * 32'($signed(value2[8*i+:8]));
                sum_V[i] <= sum_V[i] + 24'($signed(value2[8*i+:8]));
            end
        end

        case (state)
            SCORE: if (in_valid) begin
                if (count == '0) most <= NOTHING;
                {scored, scaled1, shown1, bias1, place1} <= {1'b1, scaled, shown, bias, count};
                count <= last ? '0 : count + 1'b1;
                if (last) state <= SCORED;
            end
            SCORED: begin
                sum_w <= 31'd0;
                sum_P <= 24'd0;
                for (int i = 0; i < VALUES; i++) begin
                    O[i] <= 32'sd0;
                    sum_V[i] <= 24'sd0;
                end
                state <= WEIGH;
            end
            WEIGH: if (in_valid) begin
                t <= (biased ? below[31:0] : product) + start;
                {weighed, value1, part1} <= {1'b1, value, part_of[count]};
                count <= last ? '0 : count + 1'b1;
                if (last) state <= WEIGHED;
            end
            WEIGHED: state <= ADDED;
            ADDED: state <= ALIGN;
            ALIGN: begin
                // twice: the first time finds the divisor, the second its length
                denominator <= !exact ? 31'(sum_P) : sum_w > rounded ? sum_w : rounded;
                missing <= exact && sum_w > rounded ? 22'((sum_w - rounded) >> 8) : 22'd0;
                bits <= !exact ? length : length > 6'd7 ? length - 6'd7 : 6'd0;
                D <= length == 6'd0 ? 32'sd1073741824 : {1'b0, denominator} << (6'd31 - length);
                turn <= turn + 2'd1;
                if (turn == 2'd1) state <= START;
            end
            START: begin
                x <= 32'sd1515870810 - product;
                turn <= 2'd0;
                state <= ERROR;
            end
            ERROR: begin
                partial <= 32'sd268435456 - product;
                state <= STEP;
            end
            STEP: begin
                x <= x + product;
                turn <= turn == 2'd2 ? 2'd0 : turn + 2'd1;
                channel <= '0;
                state <= turn == 2'd2 ? MEAN : ERROR;
            end
            MEAN: begin
                partial <= product;
                state <= MISSING;
            end
            MISSING: begin
                numerator <= O[channel] + product;
                state <= RATIO;
            end
            RATIO: begin
                by_ratio <= product;
                state <= LEAVE;
            end
            default: begin  // LEAVE
                y <= fitted;
                out_valid <= 1'b1;
                channel <= channel + 1'b1;
                state <= channel == INDEX'(VALUES - 1) ? SCORE : MEAN;
            end
        endcase
        if (reset) begin
            state <= SCORE;
            count <= '0;
            turn <= 2'd0;
            {scored, weighed, added, out_valid} <= 4'd0;
        end
    end
endmodule
